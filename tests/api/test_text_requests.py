"""Properties of stop strings, penalties, log-probabilities, token bytes and request parsing."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from castiron.pipelines.api.api_errors import ApiError, QueueFull, Stopping, api_error
from castiron.pipelines.api.openai.records import ChatRequest, CompletionRequest, TokenizeRequest
from castiron.pipelines.api.request_body import parse_body
from castiron.pipelines.engine.request import Finished, Request
from castiron.pipelines.engine.sampling import Sampler, Sampling, log_probabilities
from castiron.pipelines.engine.scheduler import ModelFailed
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from castiron.pipelines.text.text_output import Delta, StopStrings, text_request
from castiron.pipelines.text.tokenizer import TokenBytes
from tests.support import toy_text
from tests.support.generating import choose
from tests.text.test_generate_text import TEXTS, byte_level

VOCAB = 40
LOGITS = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(lambda v: np.array(v, np.float32) / 4)
PIECES = st.lists(st.text("ab", max_size=3), max_size=12)
STRINGS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


@given(PIECES, STRINGS)
@example(["aab"], ["b", "a"])
@example(["aba"], ["abab", "ba"])
def test_text_ends_before_the_first_stop_string(pieces, strings):
    """Only text that may become a stop string is delayed."""
    stops, generated, text = StopStrings(strings), "", "".join(pieces)
    for count, piece in enumerate(pieces, 1):
        generated += stops.add(piece)
        pending = "".join(pieces[:count])[len(generated) :]
        assert stops.stopped or not pending or any(string.startswith(pending) for string in strings)
        assert not stops.stopped or stops.add("more") == ""
    generated += stops.add("", final=True)
    indices = [index for string in strings if (index := text.find(string)) >= 0]
    assert generated == text[: min(indices, default=len(text))]
    assert stops.stopped == bool(indices)


def test_tokens_after_a_stop_string_are_not_reported():
    """Text and tokens agree, also where a stop string cuts or delays the text."""
    text = TEXTS["byte-level"]
    tokens = text.backend.encode("he said: he你 then left", add_special_tokens=False).ids
    for stop in ("then", "said", "你", "nothing", "t"):
        events = []
        request = text_request([1], 100, text, max_tokens=len(tokens), stop_strings=[stop])
        for token in tokens:
            events += request.advance(token, None)
            if isinstance(events[-1], Finished):
                break
        emitted = "".join(e.text for e in events if isinstance(e, Delta))
        full = "he said: he你 then left"
        assert emitted == (full[: full.find(stop)] if stop in full else full)
        assert events[-1].reason == ("stop" if stop in full else "length")
        generated = [token for e in events if isinstance(e, Delta) for token in e.tokens]
        assert text.decode(token.id for token in generated).startswith(emitted)
        offsets = [token.offset for token in generated]
        assert all(offset < len(emitted) for offset in offsets) and offsets == sorted(offsets)


@given(LOGITS, st.lists(st.integers(0, VOCAB - 1), max_size=8), st.floats(-2, 2), st.floats(-2, 2),
       st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4))  # fmt: skip
@example(np.eye(VOCAB, dtype=np.float32)[3] * 2 + 0.5, [3, 3, 3], 0.0, 1.5, {})
@example(np.eye(VOCAB, dtype=np.float32)[3] * 2 + 0.5, [3, 3, 3], 0.5, 0.0, {})
def test_penalties_and_biases_are_openais(logits, generated, frequency, presence, bias):
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, greedily."""
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence, logit_bias=bias)
    changed = logits.astype(np.float64)
    for token in range(VOCAB):
        count = generated.count(token)
        changed[token] += -count * frequency - (count > 0) * presence + bias.get(token, 0.0)
    chosen = choose(Sampler(sampling), logits, [5, 6, *generated], Counter(generated))
    assert changed[chosen] == changed.max()


def test_penalties_count_generated_tokens_only():
    """With a frequency penalty of 0.6 a token that leads by 1 is generated twice."""
    logits = np.array([0, 3, 2, -9], np.float32)
    request = Request([1, 1, 1], 100, max_tokens=3, sampling=Sampler(Sampling(frequency_penalty=0.6)))
    while request.finish_reason is None:
        request.advance(1, lambda: logits)
    assert request.tokens == [1, 1, 2]


@given(LOGITS, st.integers(0, VOCAB - 1), st.integers(0, VOCAB + 3))
def test_log_probabilities_are_of_the_models_own_distribution(logits, token, count):
    expected = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    logprob, top = log_probabilities(logits, token, count)
    assert logprob == pytest.approx(expected[token], abs=1e-6)
    order = sorted(range(VOCAB), key=lambda t: (-logits[t], t))[:count]
    assert [t for t, _ in top] == order
    assert [p for _, p in top] == pytest.approx(list(expected[order]), abs=1e-6)


@pytest.mark.parametrize("kind", TEXTS)
@given(
    words=st.text(
        alphabet=st.one_of(st.sampled_from(" abhet\n"), st.characters(exclude_characters="▁", exclude_categories=["Cs"]))
    )
)
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(kind, words):
    text = TEXTS[kind]
    token_bytes = TokenBytes(text.backend)
    joined = b"".join(map(token_bytes, text.backend.encode(words, add_special_tokens=False).ids))
    # SentencePiece adds a space before the text.
    assert joined in (words.encode(), b" " + words.encode())


def test_every_id_has_bytes():
    token_bytes = TokenBytes(byte_level())
    assert token_bytes(byte_level().token_to_id("<|end|>")) == b"<|end|>"
    assert token_bytes(10**6) == b""


MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("kind", "body", "param", "message"),
    [
        (ChatRequest, {}, "messages", "you must provide messages"),
        (ChatRequest, {"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "'user'"),
        (ChatRequest, {"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string or a list of parts"),
        (
            ChatRequest,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0.type",
            "takes text",
        ),
        (ChatRequest, {"messages": MESSAGES, "temperature": -0.5}, "temperature", "greater than or equal to 0"),
        (ChatRequest, {"messages": MESSAGES, "max_tokens": -2}, "max_tokens", "greater than or equal to -1"),
        (ChatRequest, {"messages": MESSAGES, "n": 1000}, "n", "128"),
        (ChatRequest, {"messages": MESSAGES, "top_logprobs": 21}, "top_logprobs", "20"),
        (ChatRequest, {"messages": MESSAGES, "stop": ["a", "b" * 257]}, "stop.1", "at most 256 characters"),
        (ChatRequest, {"messages": MESSAGES, "logit_bias": {"5": 101}}, "logit_bias.5", "100"),
        (ChatRequest, {"messages": MESSAGES, "frobnicate": 1}, "frobnicate", "Unrecognized request argument supplied"),
        (ChatRequest, {"messages": MESSAGES, "tools": [{"type": "function"}]}, "tools.0.function", "you must provide"),
        (CompletionRequest, {"prompt": []}, "prompt", "token ids"),
        (CompletionRequest, {"prompt": [-1]}, "prompt", "token ids"),
        (CompletionRequest, {"prompt": "a", "logprobs": 21}, "logprobs", "20"),
        (CompletionRequest, {"prompt": "a", "suffix": 5}, "suffix", "string"),
        (TokenizeRequest, {"content": 5}, "content", "string"),
    ],
)
def test_a_bad_field_is_named(kind, body, param, message):
    with pytest.raises(ApiError) as error:
        parse_body(kind, json.dumps(body).encode(), strict=True)
    assert error.value.status == 400 and error.value.param == param and message in error.value.message
    assert set(error.value.body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b"\xff\xfe", b'{"messages": "\\ud800"}', b"[" * 100_000,
                                  b'{"temperature": NaN, "messages": []}'])  # fmt: skip
def test_rejects_a_body_that_is_not_a_request(data):
    with pytest.raises(ApiError) as error:
        parse_body(ChatRequest, data)
    assert error.value.status == 400 and "\n" not in error.value.message


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_rejected(data):
    for kind in (ChatRequest, CompletionRequest, TokenizeRequest):
        try:
            parse_body(kind, data)
        except ApiError as error:
            assert error.status == 400


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [(QueueFull("busy"), 503, "queue_full"), (Stopping(), 503, "shutting_down"),
     (ModelFailed(ValueError("inside")), 500, "model_failure"), (PipelineError("no"), 400, None)],
)  # fmt: skip
def test_every_failure_behind_the_http_has_its_status(error, status, code):
    found = api_error(error)
    assert (found.status, found.code, found.message) == (status, code, str(error))
    assert "inside" not in found.message, "clients must not see the server's internal errors"


def test_a_bundle_without_a_tokenizer_cannot_be_served(tmp_path):
    with pytest.raises(PipelineError, match="no tokenizer"):
        open_app(toy_text.write(tmp_path / "bare", text=False))
