"""Request fields of OpenAI, vLLM and llama.cpp are honoured, logged and ignored, or refused."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from castiron.pipelines.api import request_body
from castiron.pipelines.api.model_api import Limits
from castiron.pipelines.engine.request import Chooser
from castiron.pipelines.server.app import open_app
from tests.support import talking

talking_path = talking.talking_path
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/messages"
REQUIRED = {
    CHAT: {"messages": HI, "max_tokens": 1},
    TEXT: {"prompt": "hi", "max_tokens": 1},
    ANTHROPIC: {"messages": HI, "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("n", "w")]
SCHEMA = {"type": "object", "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
CUSTOM = {
    "type": "custom",
    "custom": {"name": "c", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}},
}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": TOOLS[:1]}}
SAMPLERS = ["penalties", "dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]
# Fields of both OpenAI endpoints, with a value that clients send.
HONOURED = [
    ("model", None), ("frequency_penalty", 0.5), ("logit_bias", {"5": -1}), ("logit_bias", []),
    ("logit_bias", [[5, -1.0], ["x", False]]), ("max_tokens", -1), ("n", 2), ("presence_penalty", 0.5), ("seed", -1), ("stop", ["x"]), ("stream", True), ("temperature", 0.5),
    ("top_p", 0.9), ("user", "me"), ("response_format", {"type": "text"}), ("top_k", -1), ("min_p", 0.1),
    ("repetition_penalty", 1.1), ("length_penalty", 1.0), ("length_penalty", 1), ("stop_token_ids", []), ("ignore_eos", False),
    ("include_stop_str_in_output", False), ("min_tokens", 0), ("skip_special_tokens", True), ("use_beam_search", False),
    ("spaces_between_special_tokens", True), ("truncate_prompt_tokens", 4), ("truncate_prompt_tokens", -1),
    ("truncation_side", "left"), ("truncation_side", "right"), ("return_token_ids", True), ("prompt_logprobs", 1),
    ("allowed_token_ids", [5, 6]), ("bad_words", ["x"]),
    ("structured_outputs", {"choice": ["a", "b"]}), ("guided_choice", ["a", "b"]), ("guided_regex", "a|b"), ("priority", 0),
    ("return_token_ids", False), ("return_tokens_as_token_ids", False), ("return_prompt_text", False), ("vllm_xargs", {}),
    ("thinking_token_budget", 5), ("thinking_token_budget", -1), ("watermarking", False), ("n_predict", -1),
    ("dynatemp_range", 0.0), ("typical_p", 1.0), ("repeat_penalty", 1.1), ("repeat_last_n", 64), ("dry_multiplier", 0.0),
    ("xtc_probability", 0), ("top_n_sigma", -1.0), ("mirostat", 0), ("grammar", 'root ::= "a" | "b"'), ("n_probs", 0), ("min_keep", 0),
    ("cache_prompt", False), ("return_tokens", False), ("samplers", SAMPLERS), ("samplers", "ekpmt"), ("repeat_last_n", -1), ("top_p", 0),
    ("stop", ""), ("stop", ["", "x"]), ("grammar", ""), ("adaptive_target", -1.0), ("n_cmpl", 2), ("max_tokens", 1.0), ("post_sampling_probs", False), ("lora", []),
    ("n_cmpl", 1), ("reasoning_budget_tokens", 5),
]  # fmt: skip
CHAT_HONOURED = [
    ("max_completion_tokens", 1), ("max_tokens", 100_000), ("metadata", {"a": "b"}), ("store", True), ("parallel_tool_calls", True),
    ("safety_identifier", "x"), ("prompt_cache_key", "x"), ("verbosity", "medium"), ("modalities", ["text"]), ("tools", TOOLS),
    ("functions", [{"name": "n"}]), ("reasoning_effort", "high"), ("reasoning_effort", "none"), ("include_reasoning", False),
    ("echo", False), ("add_generation_prompt", True), ("continue_final_message", False), ("add_special_tokens", False),
    ("documents", []), ("chat_template_kwargs", {"enable_thinking": False}), ("thinking", {"type": "enabled", "budget_tokens": 9}),
    ("thinking", {"type": "disabled"}), ("parse_tool_calls", True), ("reasoning_format", "auto"), ("logprobs", True),
]  # fmt: skip
IGNORED = [
    ("service_tier", "flex"), ("prompt_cache_retention", "24h"), ("prediction", {"type": "content", "content": "x"}),
    ("request_id", "x"), ("session_id", "x"), ("cache_salt", "x"), ("kv_transfer_params", {}), ("mm_processor_kwargs", {}),
    ("media_io_kwargs", {}), ("stream_interval", 2), ("guided_decoding_backend", "xgrammar"), ("id_slot", -1), ("n_keep", 0),
    ("n_discard", 0), ("n_cache_reuse", 0), ("dynatemp_exponent", 1.0), ("dry_base", 1.75), ("dry_allowed_length", 2),
    ("dry_penalty_last_n", 64), ("dry_sequence_breakers", ["\n"]), ("xtc_threshold", 0.1), ("mirostat_tau", 5.0), ("mirostat_eta", 0.1),
    ("timings_per_token", True), ("return_progress", True), ("sse_ping_interval", 30), ("reasoning_control", False),
    ("routed_experts_prompt_start", 0), ("return_mm_kwargs", True), ("a_field_of_next_year", [1]),
]  # fmt: skip
REFUSED = [
    ("use_beam_search", True), ("length_penalty", 1.5), ("include_stop_str_in_output", True), ("skip_special_tokens", False),
    ("truncation_side", "middle"), ("logprob_token_ids", [5]), ("return_tokens_as_token_ids", True),
    ("repetition_detection", {"max_pattern_size": 3}), ("vllm_xargs", {"a": 1}), ("watermarking", True), ("n_probs", 3),
    ("dynatemp_range", 0.5), ("typical_p", 0.9), ("dry_multiplier", 0.8), ("xtc_probability", 0.5), ("top_n_sigma", 1.0),
    ("mirostat", 2), ("samplers", ["xtr"]), ("samplers", ["infill"]), ("lora", [{"id": 0, "scale": 1.0}]), ("repeat_last_n", -2),
    ("adaptive_target", 0.5), ("logits_processors", ["x"]), ("top_p", -0.1), ("allowed_token_ids", []),
    ("allowed_token_ids", [10**6]), ("prompt_logprobs", 1000), ("max_tokens", -2), ("logit_bias", [[5, True]]), ("bad_words", [""]),
]  # fmt: skip
CHAT_REFUSED = [
    ("audio", {"voice": "x"}), ("modalities", ["audio"]), ("verbosity", "loud"), ("web_search_options", {}), ("chat_template", "x"),
    ("documents", [{"text": "x"}]), ("echo", True), ("reasoning_format", "none"),
    ("reasoning_effort", "enormous"), ("tool_choice", ALLOWED), ("response_format", FORM),
]  # fmt: skip
PROBES = [
    *((CHAT, *each, "honoured") for each in [*HONOURED, *CHAT_HONOURED]), *((CHAT, *each, "ignored") for each in IGNORED),
    *((CHAT, *each, "refused") for each in [*REFUSED, *CHAT_REFUSED]), *((TEXT, *each, "honoured") for each in HONOURED),
    *((TEXT, *each, "ignored") for each in IGNORED), *((TEXT, *each, "refused") for each in REFUSED),
    (TEXT, "add_special_tokens", False, "honoured"), (TEXT, "echo", True, "honoured"), (TEXT, "best_of", 1, "honoured"),
    (ANTHROPIC, "service_tier", "priority", "ignored"), (ANTHROPIC, "inference_geo", "us", "ignored"),
    (ANTHROPIC, "output_config", {"effort": "low"}, "honoured"), (ANTHROPIC, "container", "x", "refused"),
    (ANTHROPIC, "thinking", {"type": "enabled", "budget_tokens": 1024}, "honoured"),
    ("/v1/responses", "service_tier", "flex", "ignored"), ("/v1/responses", "reasoning", {"effort": "high"}, "honoured"),
    ("/v1/responses", "background", True, "refused"),
]  # fmt: skip


@pytest.fixture(scope="module")
def client(talking_path):
    with TestClient(open_app(talking_path, threads=1)) as found:
        yield found


@pytest.fixture(scope="module")
def strict(talking_path):
    with TestClient(open_app(talking_path, threads=1, limits=Limits(strict_requests=True))) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_logged_yet(monkeypatch):
    monkeypatch.setattr(request_body, "_logged", set())


def ask(client, path: str = CHAT, **more) -> dict:
    answer = client.post(path, json=REQUIRED[path] | {"temperature": 0} | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize(("path", "field", "value", "outcome"), PROBES, ids=str)
def test_every_documented_field_is_honoured_ignored_or_refused(client, strict, capsys, path, field, value, outcome):
    body = REQUIRED[path] | {field: value}
    answer, logged = client.post(path, json=body), capsys.readouterr().err
    if outcome == "refused":
        error = answer.json()["error"]
        assert answer.status_code == 400 and field in f"{error.get('param')} {error['message']}" and not logged
        return
    assert answer.status_code == 200, answer.text
    if outcome == "ignored":
        assert logged.count("\n") == 1 and f"'{field}' has no effect" in logged
        assert client.post(path, json=body).status_code == 200 and not capsys.readouterr().err, "logged once"
        assert strict.post(path, json=body).status_code == 400
    else:
        assert not logged and strict.post(path, json=body).status_code == 200


def test_unknown_fields_are_limited_in_number_and_sanitised_in_the_log(client, strict, capsys):
    ask(client, **{"evil\x1b[2J\n": 1})
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1 and "\x1b" not in printed
    many = {f"k{i}": 1 for i in range(request_body.MAX_LOGGED)}
    answer = client.post(CHAT, json=REQUIRED[CHAT] | many)
    assert answer.status_code == 400 and "too many unknown fields: 1000 (limit: 100)" in answer.text
    for part in range(11):
        ask(client, **{f"k{part}-{i}": 1 for i in range(100)})
    assert capsys.readouterr().err.count("\n") == request_body.MAX_LOGGED - 1
    error = strict.post(CHAT, json=REQUIRED[CHAT] | {"stream_options": {"x": 1}, "stream": True}).json()["error"]
    assert error["param"] == "stream_options.x"


def test_message_fields_that_a_template_does_not_read_pass(client, strict):
    more = {"name": "ann", "id": "m1", "metadata": {"a": 1}, "reasoning_details": [{"text": "x"}]}
    messages = [{**HI[0], **more}, {"role": "assistant", "content": "x"}, {**HI[0], "name": "bob"}]
    assert ask(client, messages=messages)["usage"]["prompt_tokens"] == len("u:hi;a:x;u:hi;a:")
    answer = strict.post(CHAT, json=REQUIRED[CHAT] | {"messages": messages})
    assert answer.status_code == 400 and answer.json()["error"]["param"].startswith("messages.0.")
    for call in ({"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "n", "arguments": "{}"}}]},
                 {"role": "assistant", "content": "", "function_call": {"name": "n", "arguments": "{}"}}):  # fmt: skip
        result = {"role": "function", "name": "n", "content": "ok"}
        assert ask(client, messages=[*HI, call, result])["usage"]["prompt_tokens"] == len("u:hi;a:<n>;t:ok;a:")


def test_max_tokens_is_clamped_in_chat_and_minus_one_is_no_limit(client):
    free = 254 - len("u:hi;a:") + 1
    for limit in (-1, 10**6):
        answer = ask(client, max_tokens=limit, ignore_eos=True)
        assert answer["usage"]["completion_tokens"] == free and answer["choices"][0]["finish_reason"] == "length"
    assert ask(client, TEXT, max_tokens=-1, ignore_eos=True)["usage"]["completion_tokens"] == 254 - len("hi") + 1
    assert ask(client, TEXT, max_tokens=None, n_predict=7, ignore_eos=True)["usage"]["completion_tokens"] == 7


def test_allowed_tokens_and_bad_words_decide_the_tokens(client):
    usual = ask(client, TEXT, max_tokens=12, ignore_eos=True)["choices"][0]["text"]
    only = client.post("/tokenize", json={"content": "xyz"}).json()["tokens"]
    assert set(ask(client, TEXT, max_tokens=12, allowed_token_ids=only)["choices"][0]["text"]) <= set("xyz")
    for word in (usual[:2], usual[3]):
        text = ask(client, TEXT, max_tokens=12, ignore_eos=True, bad_words=[word])["choices"][0]["text"]
        assert text[: usual.index(word) + len(word) - 1] == usual[: usual.index(word) + len(word) - 1] and word not in text
    answer = client.post(TEXT, json={**REQUIRED[TEXT], "bad_words": ["a"], "regex": "b"})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "bad_words"


def test_a_truncated_prompt_has_its_last_tokens(client):
    complete = ask(client, TEXT, prompt="o there", max_tokens=8)
    cut = ask(client, TEXT, prompt="Hello there", max_tokens=8, truncate_prompt_tokens=len("o there"))
    assert cut["choices"][0]["text"] == complete["choices"][0]["text"] and cut["usage"]["prompt_tokens"] == len("o there")
    assert ask(client, TEXT, prompt="x" * 300, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 254
    assert ask(client, truncate_prompt_tokens=3)["usage"]["prompt_tokens"] == 3
    first = ask(client, TEXT, prompt="Hello there", max_tokens=8, truncate_prompt_tokens=len("Hello"), truncation_side="right")
    assert first["choices"][0]["text"] == ask(client, TEXT, prompt="Hello", max_tokens=8)["choices"][0]["text"]


def test_biases_may_be_given_by_text_and_forbid_tokens(client):
    usual = ask(client, TEXT, max_tokens=8, ignore_eos=True)["choices"][0]["text"]
    ids = client.post("/tokenize", json={"content": usual[:2]}).json()["tokens"]
    for banned in (
        [[token, False] for token in ids],
        [[usual[:2], -100]],
        {usual[:2]: -100},
        {str(token): False for token in ids},
    ):
        text = ask(client, TEXT, max_tokens=8, ignore_eos=True, logit_bias=banned)["choices"][0]["text"]
        assert text and not set(text) & set(usual[:2])
    # In a list, digits are a text.
    assert set(ask(client, TEXT, max_tokens=4, logit_bias=[["7", 100]])["choices"][0]["text"]) == {"7"}


def test_seed_minus_one_is_random(client):
    sample = lambda seed: ask(client, TEXT, max_tokens=16, temperature=2, ignore_eos=True, seed=seed)["choices"][0]["text"]
    assert len({sample(-1) for _ in range(3)}) > 1 and sample(-2) == sample(-2)


def test_token_ids_are_those_of_the_prompt_and_the_answer(client):
    tokens = lambda text: client.post("/tokenize", json={"content": text}).json()["tokens"]
    special = [[token, False] for token in range(3)]
    more = {"return_token_ids": True, "ignore_eos": True, "max_tokens": 6, "logit_bias": special}
    answer = ask(client, **more)
    (choice,) = answer["choices"]
    assert answer["prompt_token_ids"] == tokens("u:hi;a:") and choice["token_ids"] == tokens(choice["message"]["content"])
    (choice,) = ask(client, TEXT, **more)["choices"]
    assert choice["prompt_token_ids"] == tokens("hi") and choice["token_ids"] == tokens(choice["text"])
    for path, first in ((CHAT, lambda chunk: chunk), (TEXT, lambda chunk: chunk["choices"][0])):
        stream = client.post(path, json=REQUIRED[path] | more | {"temperature": 0, "stream": True}).text
        chunks = [json.loads(line[6:]) for line in stream.split("\n\n")[:-2]]
        assert first(chunks[0])["prompt_token_ids"] == tokens("u:hi;a:" if path == CHAT else "hi")
        found = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
        assert found == ask(client, path, **more)["choices"][0]["token_ids"] and "prompt_token_ids" not in first(chunks[1])


def test_reasoning_is_left_out_on_request(client, monkeypatch):
    body = {"include_reasoning": False, "max_tokens": 100}
    script(monkeypatch, client, "<think>abc</think>Done.")
    answer = ask(client, **body)
    assert "reasoning_content" not in answer["choices"][0]["message"] and answer["choices"][0]["message"]["content"] == "Done."
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    script(monkeypatch, client, "<think>abc</think>Done.")
    assert "reasoning_content" not in client.post(CHAT, json=REQUIRED[CHAT] | body | {"stream": True}).text


def test_prompt_logprobs_are_those_of_an_echoed_prompt(client):
    echoed = ask(client, TEXT, prompt="Hello", echo=True, logprobs=2)["choices"][0]["logprobs"]["token_logprobs"][:5]
    first, *others = ask(client, TEXT, prompt="Hello", prompt_logprobs=2)["choices"][0]["prompt_logprobs"]
    ids = client.post("/tokenize", json={"content": "Hello"}).json()["tokens"]
    assert first is None and [found[str(token)]["logprob"] for token, found in zip(ids[1:], others)] == echoed[1:]
    assert all({1, 2} <= {each["rank"] for each in found.values()} for found in others)
    chat = ask(client, prompt_logprobs=0)
    assert len(chat["prompt_logprobs"]) == len("u:hi;a:") and all(len(found) == 1 for found in chat["prompt_logprobs"][1:])
    assert client.post(TEXT, json={**REQUIRED[TEXT], "prompt_logprobs": 1, "stream": True}).status_code == 400


def script(monkeypatch, client, words: str) -> None:
    """Make the model prefer the tokens of `words`; a constraint may force others before."""
    text = client.app.api.tokenizer
    wanted = [*text.encode(words), text.eos[0]]

    def pick(self, *_) -> int:
        forced = self.constraint.forced[0] if self.constraint and self.constraint.forced else None
        return wanted.pop(0) if forced in (None, wanted[0]) else forced

    monkeypatch.setattr(Chooser, "pick", pick)


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"thinking_token_budget": 3}),
        (CHAT, {"reasoning_budget_tokens": 3, "thinking_token_budget": -1}),
        (CHAT, {"thinking": {"type": "enabled", "budget_tokens": 3}}),
        (ANTHROPIC, {"thinking": {"type": "enabled", "budget_tokens": 3}}),
    ],
)
def test_a_budget_closes_the_reasoning_and_the_answer_follows(client, monkeypatch, path, more):
    script(monkeypatch, client, "<think>abcDone.")
    answer = ask(client, path, max_tokens=100, **more)
    if path == ANTHROPIC:
        assert [block.get("thinking") or block["text"] for block in answer["content"]] == ["abc", "Done."]
    else:
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("abc", "Done.")


@pytest.mark.parametrize(("words", "budget", "parts"), [
    ("<think>ab</think>Done.", 2, ("ab", "Done.")), ("<think>ab</think>Done.", 50, ("ab", "Done.")), ("Done.", 1, (None, "Done.")),
    ("<think>Done.", 0, (None, "Done.")),
])  # fmt: skip
def test_a_budget_that_is_not_exceeded_changes_nothing_else(client, monkeypatch, words, budget, parts):
    script(monkeypatch, client, words.replace("</think>", "") if budget == 2 else words)
    message = ask(client, max_tokens=100, thinking_token_budget=budget)["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == parts


def test_the_tokens_before_the_budget_is_used_are_those_of_the_model(client):
    """With a grammar too, which applies after the reasoning."""
    begun = {"messages": [*HI, {"role": "assistant", "content": "<think>"}], "continue_final_message": True, "max_tokens": 40}
    usual = ask(client, **begun, ignore_eos=True)["choices"][0]["message"]["reasoning_content"]
    for more in ({}, {"regex": "yes|no"}):
        message = ask(client, **begun, **more, ignore_eos=not more, thinking_token_budget=9)["choices"][0]["message"]
        assert usual.startswith(message["reasoning_content"]) and 0 < len(message["reasoning_content"]) <= 9
        assert message["content"] in ("yes", "no") if more else len(message["content"]) > 5


def test_old_functions_get_old_calls(client, monkeypatch):
    script(monkeypatch, client, '<tool_call>{"name": "n", "arguments": {"a": 1}}</tool_call>')
    functions = [{"name": "n"}, {"name": "w"}]
    choice = ask(client, functions=functions, max_tokens=100)["choices"][0]
    assert (
        choice["message"]["function_call"] == {"name": "n", "arguments": '{"a": 1}'}
        and choice["finish_reason"] == "function_call"
    )
    assert "tool_calls" not in choice["message"]
    script(monkeypatch, client, '<tool_call>{"name": "n", "arguments": {"a": 1}}</tool_call>')
    stream = client.post(CHAT, json={"messages": HI, "functions": functions, "stream": True, "max_tokens": 100}).text
    chunks = [json.loads(line[6:])["choices"][0] for line in stream.split("\n\n")[:-2]]
    parts = [chunk["delta"]["function_call"] for chunk in chunks if "function_call" in chunk["delta"]]
    assert parts[0]["name"] == "n" and "".join(part["arguments"] for part in parts) == '{"a": 1}'
    assert chunks[-1]["finish_reason"] == "function_call"
    monkeypatch.undo()
    named = ask(client, functions=functions, function_call={"name": "w"}, max_tokens=100)["choices"][0]["message"][
        "function_call"
    ]
    assert named["name"] == "w"


def test_allowed_tools_are_the_only_ones_in_the_prompt_and_the_answer(client):
    only = {**ALLOWED, "allowed_tools": {**ALLOWED["allowed_tools"], "mode": "required"}}
    answer = ask(client, tools=TOOLS, tool_choice=only, parallel_tool_calls=False, max_tokens=100)
    assert answer["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "n"
    assert answer["usage"]["prompt_tokens"] == ask(client, tools=TOOLS[:1])["usage"]["prompt_tokens"]


def test_custom_tools_are_called_with_a_text(client, monkeypatch):
    tool = {"type": "custom", "custom": {"name": "c", "description": "d", "format": {"type": "text"}}}
    body = {"tools": [tool, *TOOLS], "max_tokens": 100}
    wanted = '<tool_call>\n{"name": "c", "arguments": {"input": "a\\n\\"b"}}\n</tool_call>'
    script(monkeypatch, client, wanted)
    choice = ask(client, **body)["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (
        call["type"] == "custom"
        and call["custom"] == {"name": "c", "input": 'a\n"b'}
        and choice["finish_reason"] == "tool_calls"
    )
    script(monkeypatch, client, wanted)
    stream = client.post(CHAT, json={"messages": HI, **body, "stream": True}).text
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in stream.split("\n\n")[:-2]]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    assert parts[0]["type"] == "custom" and parts[0]["id"] and parts[0]["custom"]["name"] == "c"
    assert [part["custom"]["input"] for part in parts] == ["", "a", "\n", '"', "b"]
    monkeypatch.undo()
    forced = ask(client, **body, tool_choice={"type": "custom", "custom": {"name": "c"}})["choices"][0]["message"]["tool_calls"]
    assert forced[0]["custom"]["name"] == "c"
    history = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": call["id"], "content": "ok"}]
    assert ask(client, messages=history)["usage"]["prompt_tokens"] == len("u:hi;a:<c input>;t:ok;a:")


def test_a_grammar_of_a_custom_tool_is_refused_by_name(client):
    error = client.post(CHAT, json={**REQUIRED[CHAT], "tools": [CUSTOM]}).json()["error"]
    assert error["param"] == "tools.0.custom.format" and "not supported" in error["message"]
