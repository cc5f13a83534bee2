// Requests to the server, and its answers as they arrive.

// An error with a message for the user; `code` is the server's error code, undefined for the page's own errors.
export class ServerError extends Error {
  constructor(message, code) {
    super(message);
    this.code = code;
  }
}

async function ask(path, key, options = {}) {
  let response;
  try {
    const headers = { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
    response = await fetch(path, { ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new ServerError(error?.message ?? `The server answered with status ${response.status}.`, error?.code);
}

const post = (path, key, body, signal) => ask(path, key, { method: "POST", body: JSON.stringify(body), signal });

// Returns the models that generate text, as /v1/models describes them.
export async function models(key) {
  const { data } = await (await ask("v1/models", key)).json();
  return data.filter(model => model.sampling);
}

// Returns the number of tokens of a text.
export async function count(key, model, prompt, signal) {
  return (await (await post("tokenize", key, { model, prompt, add_special: true }, signal)).json()).count;
}

// Yields the data of server-sent events, which may arrive in parts.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) if (part.startsWith("data: ")) yield part.slice(6);
  }
}

// Yields the pieces of an answer: {text}, {reasoning}, {call: {index, name, arguments}}, {end} or {usage}.
export async function* pieces(path, key, body, signal) {
  const response = await post(path, key, body, signal);
  const broken = new ServerError("The connection broke before the answer was complete.");
  try {
    for await (const data of events(response)) {
      if (data === "[DONE]") return;
      const { error, usage, choices } = JSON.parse(data), choice = choices?.[0], delta = choice?.delta ?? {};
      if (error) throw new ServerError(error.message, error.code);
      if (delta.reasoning_content) yield { reasoning: delta.reasoning_content };
      for (const { index, function: call } of delta.tool_calls ?? []) yield { call: { index, ...call } };
      if (delta.content || choice?.text) yield { text: delta.content || choice.text };
      if (choice?.finish_reason) yield { end: choice.stop_reason ?? choice.finish_reason };
      if (usage) yield { usage };
    }
  } catch (error) {
    throw error.name === "AbortError" || error instanceof ServerError ? error : broken;
  }
  throw broken;
}
