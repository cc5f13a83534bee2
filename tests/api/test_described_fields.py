"""Each field accepts the values that its API's description allows, and rejects the others by name.

`described_fields.json` has the descriptions: for each field a list of alternatives in JSON schema's
words. The tables below list every value for which castiron differs, and why.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from castiron.pipelines.api.anthropic import messages
from castiron.pipelines.api.api_errors import ApiError
from castiron.pipelines.api.ollama import records as ollama
from castiron.pipelines.api.openai import infill, responses_records
from castiron.pipelines.api.openai.records import ChatRequest, CompletionRequest
from castiron.pipelines.api.request_body import parse_body
from castiron.pipelines.api.request_fields import EmbeddingsRequest
from castiron.pipelines.server.app import open_app
from tests.support import talking

talking_path = talking.talking_path
DESCRIBED = json.loads(Path(__file__).with_name("described_fields.json").read_text())
HI = [{"role": "user", "content": "hi"}]
CHAT, TEXT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
OLLAMA = {"options": {"num_predict": 1}, "stream": False}
# Path -> (class of the body, a request).
BODIES: dict[str, tuple[type, dict]] = {
    CHAT: (ChatRequest, {"messages": HI, "max_tokens": 1}),
    TEXT: (CompletionRequest, {"prompt": "hi", "max_tokens": 1}),
    RESPONSES: (responses_records.ResponsesRequest, {"input": "hi", "max_output_tokens": 1}),
    ANTHROPIC: (messages.MessagesRequest, {"messages": HI, "max_tokens": 1}),
    "/infill": (infill.InfillRequest, {"input_prefix": "a", "input_suffix": "b"}),
    "/api/chat": (ollama.OllamaChatRequest, {"messages": HI, **OLLAMA}),
    "/api/generate": (ollama.OllamaGenerateRequest, {"prompt": "hi", **OLLAMA}),
    "/api/embed": (ollama.OllamaEmbedRequest, {"input": "hi"}),
    "/v1/embeddings": (EmbeddingsRequest, {"input": "hi"}),
}  # fmt: skip
OTHER_MODELS = ("/infill", "/api/embed", "/v1/embeddings")
# Fields that a field needs, so that its values have an effect.
NEEDED = {
    "top_logprobs": {"logprobs": True}, "stream_options": {"stream": True}, "min_tokens": {"max_tokens": 4},
    "n_predict": {"max_tokens": None}, "max_completion_tokens": {"max_tokens": None},
}  # fmt: skip
TOOLS = {
    CHAT: [{"type": "function", "function": {"name": "n"}}], RESPONSES: [{"type": "function", "name": "n"}],
    ANTHROPIC: [{"name": "n", "input_schema": {}}],
}  # fmt: skip
EVERY: tuple[Any, ...] = (0, -1, 1, 1.0, 0.5, None, "", "x", True, False, [], [""], {})
# Values that castiron refuses though the description allows them: (fields, which values, why). PATH:NAME is a field of one path.
Rows = list[tuple[str, Callable[[Any], bool], str]]
number = lambda value: isinstance(value, int | float) and not isinstance(value, bool)
above = lambda limit: lambda value: number(value) and value > limit
below = lambda limit: lambda value: number(value) and value < limit
outside = lambda low, high: lambda value: number(value) and not low <= value <= high
equal = lambda *values: lambda value: any(value == each and type(value) is type(each) for each in values)
REFUSED: Rows = [
    ("audio moderation web_search_options conversation container /v1/responses:prompt template images", bool, "not supported"),
    ("background", equal(True), "not supported"), ("modalities", equal(["audio"]), "not supported"),
    ("previous_response_id /v1/responses:conversation container", equal("", "x"), "no such object is stored"),
    (f"{CHAT}:messages {RESPONSES}:input {ANTHROPIC}:max_tokens {TEXT}:prompt /v1/embeddings:input", equal(None), "required"),
    (f"{RESPONSES}:input", equal([]), "nothing to read"), (f"{TEXT}:prompt", equal("", [], [""]), "nothing to read"),
    ("max_completion_tokens max_tokens", below(-1), "no such limit; -1 means none"), ("best_of", above(1), "only n"),
    ("suffix", bool, "not a model for FIM"), ("dimensions", equal(0), "at least 1"),
    ("temperature", below(0), "OpenAI rejects what llama.cpp replaces by the next valid number"), ("top_k", below(-1), "so"),
    ("top_p min_p", outside(0, 1), "so"), ("frequency_penalty presence_penalty", outside(-2, 2), "so, and vLLM"),
    ("repeat_penalty repetition_penalty options.repeat_penalty", outside(0.01, 100), "not usable"),
    ("top_n_sigma xtc_probability dynatemp_range n_probs min_keep", above(0), "not supported"),
    ("typical_p options.typical_p", below(1), "not supported"), ("adaptive_target", above(-1), "not supported"),
    ("dry_multiplier mirostat", bool, "not supported"), ("samplers", equal([""]), "llama.cpp skips this"),
    ("return_tokens post_sampling_probs include_stop_str_in_output use_beam_search return_tokens_as_token_ids"
     f" {CHAT}:add_special_tokens",
     equal(True), "not supported"),
    ("skip_special_tokens spaces_between_special_tokens", equal(False), "not supported"),
    ("n n_cmpl", above(64), "above --max-queue"),
    ("length_penalty", lambda value: value not in (None, 1), "no beam search"), ("prompt_logprobs", outside(0, 20), "at most 20"),
    ("min_tokens", above(4), "above max_tokens"), ("truncate_prompt_tokens", equal(0), "nothing to read"),
    ("priority", bool, "needs --scheduling-policy priority"), ("logits_processors", bool, "not supported"),
    ("bad_words logit_bias", equal([""]), "empty"), ("grammar", equal("x"), "not a grammar"),
    ("json_schema", equal(False), "matches nothing"),
]  # fmt: skip
# Values that castiron accepts though the description does not allow them.
WIDER: Rows = [
    ("temperature", above(0), "vLLM and Ollama have no maximum"), ("logprobs", equal(6), "at most 20, as in chats"),
    (f"{CHAT}:max_tokens {TEXT}:max_tokens", equal(0, -1), "as in llama.cpp"), ("n_predict", equal(-2), "no limit, as in Ollama"), ("top_k", equal(-1), "as in vLLM"), ("repeat_last_n", equal(-1), "as in Ollama"),
    ("stop functions context_management logit_bias", equal([]), "none"), ("stop", lambda value: isinstance(value, list), "at most 16"),
    ("safety_identifier", lambda value: isinstance(value, str), "not read"), ("seed", lambda value: type(value) is int, "any integer"),
    ("max_output_tokens", equal(1, 1.0, 2, 3, 15), "at least 1"), ("json_schema", equal(True), "a JSON schema"),
    ("stop_sequences options.stop", lambda value: isinstance(value, str), "as OpenAI's stop"),
    ("options.num_predict", equal(0.5), "rounded down, as in Ollama"),
    ("keep_alive cache_control /infill:samplers", lambda value: True, "no effect"),
    ("t_max_predict_ms", equal(-2), "no limit"),
]  # fmt: skip
OBJECT = {"type": "object"}
CASES = [
    pytest.param(path, field, alternatives, id=f"{path}:{field}")
    for each in DESCRIBED
    for path in each["paths"]
    for field, alternatives in each["fields"].items()
]


def strict_schema(alternatives: list[dict]) -> dict:
    items = lambda each: {"items": strict_schema(each["items"])} if "items" in each else {}
    return {"anyOf": [{**each, **items(each)} for each in alternatives]}


def values(alternatives: list[dict]) -> Iterator[tuple[Any, bool]]:
    """Yield values at and beyond the limits of a description, and whether it allows them."""
    found = list(EVERY)
    for each in alternatives:
        limits = [each[name] for name in ("minimum", "maximum", "exclusiveMinimum") if name in each]
        found += [limit + step for limit in limits for step in (-1, 0, 1)]
        found += [-2, 3, 100] if each["type"] in ("number", "integer") else []
        found += ["x" * (each["maxLength"] + more) for more in (0, 1) if "maxLength" in each]
        is_list = each.get("items", [OBJECT])[0]["type"] == "string"
        found += each.get("enum", ()) if not is_list else [[name] for name in each["items"][0].get("enum", ["x"])]
        found += [["x"] * (each["maxItems"] + more) for more in (0, 1) if is_list and "maxItems" in each]
    checker = jsonschema.Draft202012Validator(strict_schema(alternatives))
    for value in {json.dumps(value): value for value in found}.values():
        # An object's own fields are described elsewhere.
        is_object = value == {} or value == [] and any(each.get("items") == [OBJECT] for each in alternatives)
        if not is_object:
            yield value, value is None or checker.is_valid(value)


def is_in(rows: Rows, path: str, field: str, value: Any) -> bool:
    return any({field, f"{path}:{field}"} & set(fields.split()) and test(value) for fields, test, _ in rows)


def request_of(path: str, field: str, value: Any) -> dict:
    body = {**BODIES[path][1], **NEEDED.get(field, {})} | ({"tools": TOOLS[path]} if field == "tool_choice" else {})
    parent, _, name = field.rpartition(".")
    return {**body, parent: {**body.get(parent, {}), name: value}} if parent else {**body, name: value}


def has_effect(path: str, field: str) -> bool:
    record = BODIES[path][0]
    return field.partition(".")[2] in ollama.OllamaOptions._names() if "." in field else field in record._names()


def expected(path: str, field: str, alternatives: list[dict]) -> Iterator[tuple[Any, bool | None]]:
    """Yield each value and whether castiron accepts it; None if that needs more than the body."""
    for value, is_valid in values(alternatives):
        is_accepted = is_valid or is_in(WIDER, path, field, value) or not has_effect(path, field)
        yield value, None if is_in(REFUSED, path, field, value) else is_accepted


def is_named(field: str, message: str) -> bool:
    return field.rpartition(".")[2] in message


@pytest.mark.parametrize(("path", "field", "alternatives"), CASES)
def test_a_body_is_valid_if_the_description_allows_it(path, field, alternatives):
    for value, is_accepted in expected(path, field, alternatives):
        try:
            parse_body(BODIES[path][0], json.dumps(request_of(path, field, value)).encode())
        except ApiError as error:
            assert not is_accepted and is_named(field, error.message), (value, error.message)
        else:
            assert is_accepted is not False, value


@pytest.mark.parametrize(("path", "field", "alternatives"), [case for case in CASES if case.values[0] not in OTHER_MODELS])
def test_a_server_answers_if_the_description_allows_it(client, path, field, alternatives):
    for value, is_accepted in expected(path, field, alternatives):
        answer = client.post(path, json=request_of(path, field, value))
        assert answer.status_code in ((200,) if is_accepted else (400, 503)), (value, answer.text)
        assert answer.status_code != 400 or is_named(field, answer.text), answer.text


@pytest.fixture(scope="module")
def client(talking_path):
    with TestClient(open_app(talking_path, threads=1)) as found:
        yield found
