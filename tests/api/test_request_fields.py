"""Fields have their effect or are rejected by name; CORS and content types."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.model_api import Limits
from castiron.pipelines.api.openai.chat import parse_chat
from castiron.pipelines.api.openai.records import ChatRequest, TokenizeRequest
from castiron.pipelines.api.request_body import parse_body
from castiron.pipelines.engine.sampling import Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from tests.support import toy_text

MESSAGES = [{"role": "user", "content": "bc"}]
# Reads system, user and assistant messages and enable_thinking; adds a system message if there is none.
TEMPLATE = (
    "{% if messages[0].role != 'system' %}sk{% endif %}{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
    "{{ m.role[0] }}{{ m.content }}{% if m.name %}{{ m.name }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)


def app(tmp_path_factory, template: str, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy_text, "TEMPLATE_TEXT", template)
        return open_app(toy_text.write(tmp_path_factory.mktemp("bundle") / "toy"), threads=1, **options)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with TestClient(app(tmp_path_factory, TEMPLATE)) as found:
        yield found


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A model without reasoning and tools."""
    with TestClient(app(tmp_path_factory, "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}")) as found:
        yield found


def ask(client, **body):
    return client.post("/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1, "ignore_eos": True, **body})


def size(client, **body) -> int:
    answer = ask(client, **body)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"messages": [{"role": "assistant", "content": "c", "tool_calls": [{"id": "1"}]}]},
            "messages.0.tool_calls.0.function",
        ),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinkin": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"store": 0}, "store"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"logit_bias": [["", 1]]}, "logit_bias"),
        ({"logit_bias": [[1.5, 1]]}, "logit_bias"),
        ({"logit_bias": [[[1], 1]]}, "logit_bias"),
        ({"logit_bias": [[True, 1]]}, "logit_bias"),
        ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({"repeat_penalty": 2, "repetition_penalty": 3}, "repeat_penalty"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"min_tokens": 1, "regex": "b"}, "min_tokens"),
        ({"stop_token_ids": [99]}, "stop_token_ids"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ],
)
def test_rejects_fields_that_would_be_ignored(client, body, param):
    answer = ask(client, **body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and param.split(".")[-1] in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ([], "the body must be a JSON object"),
        ({"messages": [1]}, "messages.0 must be a JSON object"),
        ({"messages": []}, "messages has 0 items; send at least 1"),
        ({"messages": MESSAGES, "response_format": "json"}, "response_format must be a JSON object"),
    ],
)
def test_errors_name_json_and_not_classes(client, body, message):
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == message


def test_fields_that_the_template_reads_reach_it(client):
    usual = size(client)
    assert size(client, messages=[{"role": "user", "content": "bc", "name": "de"}]) == usual + 2
    thinks_not = size(client, chat_template_kwargs={"enable_thinking": False})
    assert thinks_not > usual == size(client, chat_template_kwargs={"enable_thinking": True})
    assert size(client, reasoning_effort="none") == thinks_not
    # A system message equal to the template's default is not ignored.
    assert size(client, messages=[{"role": "system", "content": "k"}, *MESSAGES]) == usual


def test_template_args_of_the_server_are_defaults(client, tmp_path_factory):
    thinks = size(client)
    with TestClient(app(tmp_path_factory, TEMPLATE, template_args={"enable_thinking": False})) as quick:
        assert size(quick) > thinks == size(quick, chat_template_kwargs={"enable_thinking": True})
    with pytest.raises(PipelineError, match="does not read enable_thinkin; it reads enable_thinking"):
        app(tmp_path_factory, TEMPLATE, template_args={"enable_thinkin": False})


def test_fields_that_change_nothing_are_accepted(client, plain):
    parts = [{"type": "text", "text": "c", "cache_control": {"type": "ephemeral"}}, {"type": "refusal", "refusal": "d"}]
    message = {"role": "assistant", "content": parts, "refusal": None, "annotations": [], "tool_calls": None, "audio": None,
               "reasoning_content": "so", "name": "", "provider_specific_fields": {"refusal": None},
               "cache_control": {"type": "ephemeral"}}  # fmt: skip
    fields = {"service_tier": "auto", "verbosity": "medium", "store": False, "reasoning_effort": None, "n": 1,
              "max_completion_tokens": 1, "parallel_tool_calls": True, "user": "me", "metadata": {"a": "b"}, "top_logprobs": 0}  # fmt: skip
    assert size(client, messages=[*MESSAGES, message, *MESSAGES], **fields)
    assert size(plain, reasoning_effort="none") == size(plain)


def test_a_name_that_distinguishes_nobody_may_be_ignored(tmp_path_factory):
    """A template may ignore a name that all messages of a role have, with --strict-requests too."""
    template = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}"
    with TestClient(app(tmp_path_factory, template, limits=Limits(strict_requests=True))) as plain:
        named = [{**MESSAGES[0], "name": "ann"}, {"role": "assistant", "content": "c", "name": "helper"},
                 {"role": "tool", "content": "d", "tool_call_id": "1", "name": "look"},
                 {"role": "tool", "content": "d", "tool_call_id": "2", "name": "hear"}]  # fmt: skip
        assert size(plain, messages=named) == size(plain, messages=[{**message, "name": None} for message in named])
        for other in ({"name": "bob"}, {}, {"name": {}}):
            error = ask(plain, messages=[*named, {**MESSAGES[0], **other}]).json()["error"]
            assert error["param"] == "messages.0.name" and "ignores the field 'name'" in error["message"]


def generated(client, **body) -> tuple[str, str, int]:
    """Return the text, finish reason and number of tokens of a greedy answer."""
    answer = ask(client, **{"temperature": 0, "max_tokens": 8} | body).json()
    (choice,) = answer["choices"]
    return choice["message"]["content"], choice["finish_reason"], answer["usage"]["completion_tokens"]


def test_fields_of_vllm_and_llama_cpp_have_their_effect(client, plain):
    full, _, _ = generated(plain)
    letter = full[3]
    (end,) = plain.post("/tokenize", json={"content": letter}).json()["tokens"]
    before = full[: full.index(letter)]
    assert generated(plain, stop_token_ids=[end]) == (before, "stop", len(before))
    longer, _, count = generated(plain, stop_token_ids=[end], min_tokens=6)
    assert longer.startswith(before) and count >= 6 and letter not in longer[:6] and len(longer) == count
    assert generated(plain, stop_token_ids=[end], min_tokens=8, n=1)[1:] == ("length", 8)
    usual = size(plain)
    assert size(plain, add_generation_prompt=False) == usual == size(plain, add_generation_prompt=True)
    assert size(client, add_generation_prompt=False) == size(client) - len("a")
    assert size(client, add_generation_prompt=False, continue_final_message=True) == size(client) - len("a")
    defaults = {"skip_special_tokens": True, "include_stop_str_in_output": False, "use_beam_search": False, "length_penalty": 1.0,
                "spaces_between_special_tokens": True, "cache_prompt": True, "top_k": -1, "mirostat": 0, "min_tokens": 0}  # fmt: skip
    assert generated(plain, **defaults)[0] == full
    sampling = {
        "temperature": 0.5,
        "min_p": 0.1,
        "repeat_penalty": 1.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "seed": 4,
    }
    assert plain.app.api.sampling_of(parse_chat(ChatRequest(messages=MESSAGES, top_k=-1, **sampling))) == Sampling(
        top_k=0, **sampling
    )
    chunks = ask(plain, stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}, max_tokens=4).text
    usages = [json.loads(line[6:])["usage"]["completion_tokens"] for line in chunks.split("\n\n")[:-2]]
    assert usages[1:5] == [1, 2, 3, 4] and set(usages[5:]) == {4}
    assert plain.get("/v1/models").json()["data"][0]["max_model_len"] == toy_text.CONTEXT


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/chat/completions", "it is /v1/chat/completions"),
        ("/v1/v1/messages", "it is /v1/messages"),
        ("/v2/models", "on this server"),
    ],
)
def test_a_404_names_the_right_base_url(client, path, message):
    answer = client.post(path, json={})
    assert answer.status_code == 404 and answer.json()["error"]["message"].endswith(message)


def test_reasoning_effort_reaches_a_template_that_reads_it(tmp_path_factory):
    with TestClient(app(tmp_path_factory, "{{ reasoning_effort }}{{ messages[0].content }}")) as found:
        assert size(found, reasoning_effort="low") == size(found) + len("low")


def test_reasoning_effort_becomes_the_nearest_one_that_the_template_accepts(tmp_path_factory):
    accepts = "{% if reasoning_effort not in ('low', 'medium') %}{{ raise_exception('unknown effort') }}{% endif %}"
    with TestClient(app(tmp_path_factory, accepts + "{{ reasoning_effort }}{{ messages[0].content }}")) as found:
        sizes = {effort: size(found, reasoning_effort=effort) for effort in ("none", "low", "medium", "max")}
        body = {"messages": MESSAGES, "think": "max", "stream": False, "options": {"num_predict": 1}}
        assert found.post("/api/chat", json=body).json()["prompt_eval_count"] == sizes["medium"]
    assert sizes["none"] == sizes["low"] == sizes["medium"] - len("medium") + len("low") and sizes["max"] == sizes["medium"]


def test_verbosity_reaches_a_template_that_reads_it(tmp_path_factory, plain):
    with TestClient(app(tmp_path_factory, "{{ verbosity }}{{ messages[0].content }}")) as found:
        assert size(found, verbosity="low") == size(found) + len("low")
        body = {"input": "bc", "text": {"verbosity": "high"}, "max_output_tokens": 1}
        assert found.post("/v1/responses", json=body).json()["usage"]["input_tokens"] == size(found) + len("high")
    assert size(plain, verbosity="low") == size(plain)


def test_samplers_select_and_order_the_options(plain):
    sent = {"temperature": 0.5, "top_k": 5, "top_p": 0.7, "min_p": 0.1, "repeat_penalty": 1.5, "frequency_penalty": 0.5}
    chosen = lambda samplers: plain.app.api.sampling_of(parse_chat(ChatRequest(messages=MESSAGES, **sent, samplers=samplers)))
    usual = Sampling(0.5, 5, 0.7, 0.1, 1.5, frequency_penalty=0.5)
    unpenalised = replace(usual, repeat_penalty=1.0, frequency_penalty=0.0)
    assert chosen(["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]) == usual
    assert chosen(["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"]) == unpenalised
    assert chosen(["temperature", "min_p", "top-k"]) == replace(unpenalised, samplers=("temperature", "min_p", "top_k"))
    assert chosen("ekt") == replace(usual, samplers=("top_k", "temperature"))
    for absent in ([], ""):
        assert chosen(absent) == replace(unpenalised, temperature=1.0, samplers=("temperature",))
    assert chosen(None) == usual
    for wrong, message in (
        (["top_k", "penalties"], "before all"),
        (["temp", "temp"], "only once"),
        (["mirostat"], "'mirostat'"),
    ):
        with pytest.raises(ApiError, match=message) as error:
            chosen(wrong)
        assert error.value.param == "samplers"


def test_values_at_the_ends_of_ranges_have_their_meaning(plain):
    full = generated(plain)
    assert generated(plain, top_p=0, temperature=1.0) == generated(plain, top_k=1, temperature=1.0) == full
    for stop in ("", [], [""], None):
        assert generated(plain, stop=stop) == full
    assert generated(plain, stop=["", full[0][3]])[0] == full[0][: full[0].index(full[0][3])]
    penalised = generated(plain, repetition_penalty=100)
    assert generated(plain, repeat_penalty=100, repeat_last_n=-1) == penalised != full
    assert generated(plain, repeat_penalty=100, repeat_last_n=0) == full
    options = {"temperature": 0, "num_predict": 8.0, "repeat_penalty": 100, "repeat_last_n": -1, "top_p": 3, "stop": [""]}
    answer = plain.post("/api/chat", json={"messages": MESSAGES, "options": options, "stream": False}).json()
    assert answer["message"]["content"] == penalised[0]
    for nothing in ({"max_tokens": 0}, {"max_tokens": None, "n_predict": 0}):
        assert ask(plain, **nothing).json()["usage"]["completion_tokens"] == 0
    message = plain.post("/v1/messages", json={"messages": MESSAGES, "max_tokens": 0}).json()
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    assert ask(plain, max_tokens=2.0).json()["usage"]["completion_tokens"] == 2
    assert len(ask(plain, n_cmpl=2).json()["choices"]) == 2


def test_an_answer_without_a_limit_ends_at_the_servers(tmp_path_factory):
    with TestClient(app(tmp_path_factory, TEMPLATE, limits=Limits(max_tokens=5))) as found:
        for limits, tokens in (({"max_tokens": -1}, 5), ({"max_tokens": None}, 5), ({"max_tokens": 7}, 7)):
            answer = ask(found, **limits).json()
            assert answer["usage"]["completion_tokens"] == tokens and answer["choices"][0]["finish_reason"] == "length"
        body = {"messages": MESSAGES, "options": {"num_predict": -1}, "stream": False}
        assert found.post("/api/chat", json=body).json()["eval_count"] <= 5


def test_the_log_gives_the_reason_of_an_error(tmp_path_factory, capsys):
    with TestClient(app(tmp_path_factory, TEMPLATE, quiet=False, api_keys=["key"]), headers={"x-api-key": "key"}) as found:
        capsys.readouterr()
        for path, body, line in (
            ("/v1/chat/completions", {"messages": MESSAGES, "top_p": 2}, "400: top_p is 2; it must be less than or equal to 1"),
            ("/v1/messages", {"max_tokens": 1}, "400: you must provide messages"),
            ("/api/chat", {"messages": MESSAGES, "format": "x\x1b[2J"}, "400: format must be json or a JSON schema"),
            ("/v1/chat/completion", {}, "404: no such path on this server"),
        ):
            found.post(path, json=body)
            assert capsys.readouterr().err == f"castiron: POST {path!r} {line}\n"
        found.get("/v1/models", headers={"x-api-key": ""})
        assert "401: the API key is missing or wrong" in capsys.readouterr().err
        found.post("/v1/chat/completions", json={"messages": MESSAGES, "tool_choice": {"type": "\x1b[2J" * 999}})
        printed = capsys.readouterr().err
        assert printed.count("\n") == 1 and "\x1b" not in printed and len(printed) < 500
        assert ask(found).status_code == 200 and " 200: 6 prompt tokens" in capsys.readouterr().err


def test_thinking_sets_every_variable_that_switches_reasoning(tmp_path_factory):
    with TestClient(app(tmp_path_factory, "{{ 'bcd' if thinking else '' }}{{ messages[0].content }}")) as found:
        plain = size(found)
        assert size(found, thinking={"type": "enabled"}) == plain + len("bcd")
        body = {"messages": MESSAGES, "thinking": {"type": "enabled"}}
        assert found.post("/v1/messages/count_tokens", json=body).json()["input_tokens"] == plain + len("bcd")


def test_synonyms_must_agree():
    with pytest.raises(ApiError) as error:
        parse_body(TokenizeRequest, b'{"content": "a", "add_special": true, "add_special_tokens": false}')
    assert error.value.param == "add_special"
    assert parse_body(ChatRequest, json.dumps({"messages": MESSAGES, "max_tokens": 2, "max_completion_tokens": 2}).encode())


def test_special_tokens_are_added_where_the_server_of_that_field_adds_them(client, monkeypatch):
    monkeypatch.setattr(client.app.api.tokenizer, "encode", lambda text, special=True: [24] if special else [1])
    for body, tokens in (
        ({"content": "b"}, [1]),
        ({"content": "b", "add_special": True}, [24]),
        ({"prompt": "b"}, [24]),
        ({"prompt": "b", "add_special_tokens": False}, [1]),
    ):
        answer = client.post("/tokenize", json=body).json()
        assert answer["tokens"] == tokens and answer["max_model_len"] == toy_text.CONTEXT
    answer = client.post("/tokenize", json={"messages": MESSAGES, "add_special": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "add_special"


BODY = json.dumps({"prompt": "abc", "max_tokens": 1}).encode()
FORM = {"content-type": "application/x-www-form-urlencoded"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (FORM, 200),
        ({}, 200),
        ({"content-type": "application/json", "origin": "http://testserver"}, 200),
        ({**FORM, "origin": "https://evil.example"}, 415),
        ({"content-type": "text/plain", "origin": "null"}, 415),
        ({"origin": "http://testserver"}, 415),
    ],
)
def test_only_browsers_must_send_a_content_type(client, headers, status):
    assert client.post("/v1/completions", content=BODY, headers=headers).status_code == status


SITE = "https://app.example"


@pytest.mark.parametrize(("cors", "origin", "allowed"), [
    ([SITE], SITE, SITE), ([SITE], "https://other.example", None), (["*"], "https://other.example", "*"),
    (["http://a.b:3000", SITE], SITE, SITE), ([], SITE, None),
])  # fmt: skip
def test_cors_allows_named_origins(tmp_path_factory, cors, origin, allowed):
    """Browsers send preflight requests without the key, and pages can read a 401."""
    preflight = {"origin": origin, "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type, x-stainless-os"}  # fmt: skip
    key = {"authorization": "Bearer key"}
    with TestClient(app(tmp_path_factory, TEMPLATE, api_keys=["key"], cors=cors)) as client:
        leave = client.options("/v1/completions", headers=preflight)
        answer = client.post(
            "/v1/completions", content=BODY, headers={**key, "origin": origin, "content-type": "application/json"}
        )
        refusal = client.get("/v1/models", headers={"origin": origin})
    name = "access-control-allow-origin"
    assert [found.headers.get(name) for found in (leave, answer, refusal)] == [allowed] * 3
    assert answer.status_code == 200 and refusal.status_code == 401 and (leave.status_code == 200) == bool(allowed)
    if allowed:
        assert "x-stainless-os" in leave.headers["access-control-allow-headers"]
        assert "POST" in leave.headers["access-control-allow-methods"]
