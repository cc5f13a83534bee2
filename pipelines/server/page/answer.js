// One answer: requested with as many messages as fit in the context, and written into its node as it arrives.
import { count, pieces, ServerError } from "./server.js";
import { fit, options, size } from "./request.js";
import { path } from "./store.js";

// Tokens per character of the last conversation with each model.
const rates = new Map();
// Default max tokens that continue a text.
const COMPLETION = 512;

// Yields the pieces of the answer to the question at `index`, or those that continue the answer at `index`. Sets `chat.from`
// to the first message that fits in the context, and calls `dropped`.
async function* asked(chat, index, fields, model, signal, dropped) {
  const body = options(fields, model), going = chat.nodes[index].role === "assistant";
  const indexes = path({ ...chat, head: index }), turns = indexes.map(i => ({ role: chat.nodes[i].role, content: chat.nodes[i].content }));
  if (!model.chat_template) {
    body.prompt = turns.map(({ content }) => content).join("");
    const room = model.context_length - await count(fields.key, model.id, body.prompt, signal);
    if (room < 1) throw new ServerError(`The text fills the model's context of ${model.context_length} tokens: edit it, or start a new one.`);
    body.max_tokens ??= Math.min(COMPLETION, room);
    yield* pieces("v1/completions", fields.key, body, signal);
    return;
  }
  if (going) body.continue_final_message = true;
  const system = fields.system.trim(), known = { rate: rates.get(model.id) ?? 0, context: model.context_length };
  for (let from = fit(system, turns, Math.max(0, indexes.indexOf(chat.from)), known, false), next; ; from = next) {
    body.messages = [...(system ? [{ role: "system", content: system }] : []), ...turns.slice(from)];
    const begun = pieces("v1/chat/completions", fields.key, body, signal);
    let first;
    try { first = await begun.next(); } catch (error) {
      next = error.code === "context_length_exceeded" ? fit(system, turns, from, known, true) : from;
      if (next === from) throw error;
      continue;
    }
    chat.from = from ? indexes[from] : -1;
    dropped();
    for (let at = first; !at.done; at = await begun.next()) {
      if (at.value.usage) rates.set(model.id, at.value.usage.prompt_tokens / size(system, turns.slice(from)));
      yield at.value;
    }
    return;
  }
}

function stats({ prompt_tokens, completion_tokens, total_tokens, prompt_tokens_details }, context, wait, writing) {
  const number = value => value.toLocaleString("en"), used = Math.min(total_tokens, context);
  const speed = completion_tokens > 1 && writing > 0 ? `, ${number(Math.round(1000 * (completion_tokens - 1) / writing))} tokens/s` : "";
  return `${number(completion_tokens)} tokens${speed} · first after ${number(Math.round(wait))} ms · prompt ${number(prompt_tokens)} `
    + `(${number(prompt_tokens_details?.cached_tokens ?? 0)} cached) · context ${number(used)} of ${number(context)}`;
}

// Writes the answer into `node`, and calls `painted(state)` whenever it grows; `state` describes what the model does.
export async function write(node, chat, index, fields, model, signal, painted, dropped) {
  const started = performance.now();
  let first = 0, last = 0;
  node.end = "broken";
  painted(model.loaded === false ? "Opening the model …" : "Reading the prompt …");
  try {
    for await (const { text, reasoning, call, end, usage } of asked(chat, index, fields, model, signal, dropped)) {
      if (usage) node.stats = stats(usage, model.context_length, first - started, last - first);
      if (end) node.end = end;
      if (!text && !reasoning && !call) continue;
      last = performance.now();
      first ||= last;
      node.content += text ?? "";
      node.reasoning += reasoning ?? "";
      if (call) {
        node.calls[call.index] ??= { name: "", arguments: "" };
        node.calls[call.index].name += call.name ?? "";
        node.calls[call.index].arguments += call.arguments ?? "";
      }
      painted(text ? "Writing …" : reasoning ? "Thinking …" : "Calling …");
    }
    model.loaded = true;
  } catch (error) {
    if (error.name === "AbortError") node.end = "stopped";
    throw error;
  }
}
