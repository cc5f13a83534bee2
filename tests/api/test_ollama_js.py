"""Ollama's own client for JavaScript works with castiron's address."""

from __future__ import annotations

import json

import pytest

from tests.support import npm, served, talking

talking_path = talking.talking_path
pytestmark = npm.needs_node
SCRIPT = """
const { Ollama } = require("ollama")
const options = { temperature: 0, num_predict: 40 }
const messages = [{ role: "user", content: "hi" }], model = "checkpoint"
const tools = [{ type: "function", function: { name: "n", description: "d", parameters: { type: "object", properties: {} } } }]
const format = { type: "object", properties: { dark: { type: "boolean" } }, required: ["dark"], additionalProperties: false }
const called = [...messages, { role: "assistant", content: "", tool_calls: [{ function: { name: "n", arguments: {} } }] },
                { role: "tool", tool_name: "n", content: "ok" }]

async function main() {
  const client = new Ollama({ host: process.argv[1], headers: { Authorization: "Bearer key" } }), found = {}
  found.models = (await client.list()).models.map((each) => each.model)
  found.context = (await client.show({ model })).model_info["llama.context_length"]
  found.chat = await client.chat({ model, messages, options })
  found.parts = []
  for await (const part of await client.chat({ model, messages, options, stream: true })) found.parts.push(part)
  found.generated = (await client.generate({ model, prompt: "hi", format, options })).response
  found.after_call = (await client.chat({ model, messages: called, tools, options })).prompt_eval_count
  found.running = (await client.ps()).models.length
  found.error = await client.chat({ model: "none", messages }).catch((error) => [error.status_code, error.message])
  const stream = await client.chat({ model, messages, stream: true, options: { num_predict: -1 } })
  stream.abort()
  found.aborted = await (async () => { for await (const part of stream); })().catch((error) => error.name)
  console.log(JSON.stringify(found))
}
main()
"""


@pytest.fixture(scope="module")
def modules():
    return npm.node_modules("ollama@0.6.4")


def test_it_chats_streams_and_describes_models(modules, talking_path, tmp_path):
    with served.served(talking_path, tmp_path / "log", "--api-key", "key") as running:
        found = json.loads(npm.run_script(SCRIPT, modules, running.url))
        assert served.ask(running.url, "/health")[0] == 200
    assert found["models"] == ["tiny:latest"] and found["running"] == 1 and found["context"] == talking.CONTEXT
    chat, parts = found["chat"], found["parts"]
    assert chat["message"]["content"] and chat["done"] and chat["eval_count"] <= 40
    assert "".join(part["message"]["content"] for part in parts) == chat["message"]["content"] and len(parts) > 2
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert isinstance(json.loads(found["generated"])["dark"], bool)
    assert found["after_call"] == len("n <tool_call>;u:hi;a:<n>;t:ok;a:")
    assert found["error"][0] == 404 and "'none' does not exist" in found["error"][1]
    assert found["aborted"] == "AbortError"
