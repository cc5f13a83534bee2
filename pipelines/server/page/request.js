// Make requests from a conversation and the settings.

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
// Characters that a template adds to a message, and tokens to leave free for an answer.
const FRAME = 16, ANSWER = 1024;

// Variables of chat templates that switch reasoning on or off.
export const switches = model => ["enable_thinking", "thinking"].filter(name => model?.template_variables?.includes(name));
export const efforts = model => model?.template_variables?.includes("reasoning_effort");

// Returns the request's fields from the settings; throws an Error for an invalid schema.
export function options(fields, model) {
  const body = { model: model.id, stream: true, stream_options: { include_usage: true }, repetition_stop: true };
  for (const name of NUMBERS) if (fields[name]) body[name] = Number(fields[name]);
  const stop = (fields.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (fields.schema?.trim()) {
    let schema;
    try { schema = JSON.parse(fields.schema); } catch (error) { throw new Error(`The JSON schema in the settings is not JSON: ${error.message}.`); }
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (!model.chat_template) return body;
  const [variable] = switches(model);
  if (variable && ["on", "off"].includes(fields.thinking)) body.chat_template_kwargs = { [variable]: fields.thinking === "on" };
  if (efforts(model) && ["low", "medium", "high"].includes(fields.thinking)) body.reasoning_effort = fields.thinking;
  return body;
}

export const size = (system, turns) => turns.reduce((sum, { content }) => sum + content.length + FRAME, system.length);

// Returns the index of the first of `turns` to send: drops the oldest ones if those since `from` leave no space for an answer,
// or if the server rejected them as too long. Drops a quarter at once, because the server must prefill the rest again.
// `rate`: tokens per character, 0 if unknown. `context`: the model's context in tokens.
export function fit(system, turns, from, { rate, context }, tooLong) {
  const all = size(system, turns.slice(from)), limit = context - Math.min(context / 4, ANSWER);
  if (!tooLong && !(context && all * rate > limit)) return from;
  const goal = tooLong ? 0.75 * all : Math.min(limit, all * rate - context / 4) / rate;
  while (size(system, turns.slice(from)) > goal) {
    const next = turns.findIndex(({ role }, index) => index > from && role === "user");
    if (next < 0) break;
    from = next;
  }
  return from;
}
