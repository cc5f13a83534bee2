"""LongRoPE past its original length: the tokens of HF, which then computes its cache again."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.prefix_store import PrefixStore
from castiron.pipelines.engine.request import Request
from castiron.pipelines.engine.speculation import Speculator
from castiron.pipelines.evaluate.perplexity import bundle_logits
from castiron.pipelines.evaluate.verify import expect
from castiron.reference import hf, tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Batch, Session

ORIGINAL, CONTEXT, ANSWER = 24, 64, 16
FACTORS = {"short_factor": [1 + 0.2 * i for i in range(8)], "long_factor": [3.0 + 0.5 * i for i in range(8)]}
LONGROPE = {
    "num_hidden_layers": 2,
    "partial_rotary_factor": 1.0,
    "original_max_position_embeddings": ORIGINAL,
    "rope_parameters": {"rope_type": "longrope", **FACTORS},
}
# Logits in f32 differ by up to 2e-5 of the largest one.
TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=["kernels", "portable", "ring"])
def model(request, tmp_path_factory):
    """Return HF's model and our bundle."""
    folder = tmp_path_factory.mktemp("longrope")
    ring = request.param == "ring"
    checkpoint = tiny.tiny_model("phi3", folder / "phi3", sliding_window=12 if ring else None, **LONGROPE)
    options = Options(
        context=CONTEXT, lowering="kernels" if ring else request.param, prefill=(8,), batch=(2,), verify_widths=(4,), embed=(8,)
    )
    return hf.load(checkpoint, threads=1), open_bundle(compile_model(checkpoint, folder / "bundle", options).bundle)


@pytest.fixture(scope="module")
def program(model):
    return Session(model[1], 1).program


@pytest.fixture(scope="module")
def answer(model):
    """Return a function that generates greedily after a prompt with transformers."""
    oracle, known = model[0], {}

    def generate(prompt, count: int = ANSWER) -> list[int]:
        if (key := (*prompt, -count)) not in known:
            ids = torch.tensor([list(prompt)])
            out = oracle.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=None
            )
            known[key] = out[0, len(prompt) :].tolist()
        return known[key]

    return generate


def text(length: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(3, 211, length).tolist()


def ask(prompt, **options) -> Request:
    return Request(prompt, CONTEXT, **{"max_tokens": ANSWER, "stop_tokens": (), **options})


def run(engine: Engine, *requests: Request) -> None:
    stream = engine.stream()
    for request in requests:
        stream.submit(request)
    list(stream)


def generate(session: Session, tokens, count: int = ANSWER) -> list[int]:
    found = [session.prefill(tokens)]
    while len(found) < count:
        found.append(session.step(found[-1]))
    return found


@pytest.fixture
def read(monkeypatch) -> list[tuple[int, int]]:
    """Return a list that gets (position, number of tokens) of each prefill and verify call."""
    calls: list[tuple[int, int]] = []
    append = Session._append

    def counted(session, prepared, ids):
        calls.append((session.position, len(ids)))
        return append(session, prepared, ids)

    monkeypatch.setattr(Session, "_append", counted)
    return calls


@pytest.mark.parametrize("length", [1, 9, *range(ORIGINAL - 2, ORIGINAL + 3), 40])
def test_a_session_generates_the_tokens_of_hf(model, program, answer, length):
    wanted = answer(text(length))
    assert generate(Session(program), text(length)) == wanted == hf.greedy(model[0], text(length), ANSWER).tokens
    assert expect(model[0], text(length), wanted).tokens == wanted


def test_slots_of_both_lengths_decode_together(model, answer):
    """Some sequences outgrow the original length at different steps, others are long from the start."""
    requests = [ask(text(n, n)) for n in (3, 40, 20, 24, 25, 33, 23)]
    run(Engine(model[1], 1), *requests)
    assert [request.tokens for request in requests] == [answer(request.prompt.tolist()) for request in requests]


def test_no_token_of_a_long_prompt_is_read_again(model, answer, read):
    short, long = ask(text(4, 2)), ask(text(45, 3))
    run(Engine(model[1], 1), short, long)
    assert short.tokens == answer(text(4, 2)) and long.tokens == answer(text(45, 3))
    assert sum(count for _, count in read) == 4 + 45


def test_a_text_that_outgrows_the_length_is_read_in_chunks(model, answer, read):
    other, growing = ask(text(30, 4), max_tokens=30), ask(text(20, 5))
    run(Engine(model[1], 1), other, growing)
    assert growing.tokens == answer(text(20, 5)) and other.tokens == answer(text(30, 4), 30)
    # The last of ORIGINAL + 1 tokens is a decode step.
    assert sum(count for _, count in read) == 30 + 20 + ORIGINAL


def test_prefixes_are_reused_among_sequences_of_one_kind(model, answer):
    engine, shared = Engine(model[1], 1, single=True), text(22, 6)
    cached = {}
    for name, prompt in {
        "short": shared, "long after short": shared + text(20, 7), "long after long": shared + text(9, 8),
        "short after long": [*shared[:20], 5],
    }.items():  # fmt: skip
        count = 2 if name == "short" else ANSWER
        run(engine, request := ask(prompt, max_tokens=count))
        assert request.tokens == answer(prompt, count), name
        cached[name] = request.cached
    if any(state.kind == "window" for state in engine.manifest.states):
        assert cached["long after short"] == cached["short after long"] == 0
    else:
        assert cached == {"short": 0, "long after short": 0, "long after long": 22, "short after long": 0}


def test_a_short_prompt_reuses_a_short_one(model, answer):
    engine = Engine(model[1], 1)
    run(engine, ask(text(16, 9), max_tokens=2))
    run(engine, request := ask(text(16, 9) + [7]))
    assert request.cached == 16 and request.tokens == answer(text(16, 9) + [7])


@pytest.mark.parametrize("length", [15, 21, 24, 30])
@pytest.mark.parametrize("right", [0, 1, 3])
def test_speculation_never_crosses_the_length_in_a_call(model, answer, monkeypatch, read, length, right):
    prompt = text(length, 10)
    wanted, seen = answer(prompt, 20), []

    def propose(self, count: int) -> list[int]:
        done = len(self.tokens) - length
        return [(wanted[done + i] if done + i < 20 and i < right else 3) for i in range(count)]

    def options(self, widest: int, left: int) -> list[tuple[float, str, int]]:
        seen.append((self.session.position, widest))
        return [(1e9, "ngram", widest - 1)]

    monkeypatch.setattr("castiron.pipelines.engine.speculation.Ngrams.propose", propose)
    monkeypatch.setattr(Speculator, "_ngram_options", options)
    run(Engine(model[1], 1, single=True, ngrams=True), request := ask(prompt, max_tokens=20))
    assert request.tokens == wanted
    assert all(widest == 4 for position, widest in seen if position >= ORIGINAL)
    assert not any(position < ORIGINAL < position + widest for position, widest in seen)
    assert {position < ORIGINAL for position, _ in seen} == {length < 20, False}


def test_a_session_returns_to_either_side_of_the_length(program, answer):
    session = Session(program)
    generate(session, text(36, 11))
    for length in (30, 20, 26, 24, 25, 23):
        position = session.reachable(length - 1)
        session.rewind(position)
        assert generate(session, text(36, 11)[position:length]) == answer(text(36, 11)[:length]), length
        session.rewind(0)
        session.prefill(text(36, 11))


def test_a_batch_without_an_engine_crosses_the_length(model, answer):
    """Both slots are decoded in one call; one of them crosses the length."""
    batch, prompts = Batch(model[1], 1), [text(ORIGINAL - 3, 6), text(5, 7)]
    answers = [[slot.prefill(prompt)] for slot, prompt in zip(batch.slots, prompts, strict=True)]
    for _ in range(ANSWER - 1):
        found = batch.step({slot: tokens[-1] for slot, tokens in enumerate(answers)})
        for slot, tokens in enumerate(answers):
            tokens.append(found[slot])
    assert answers == [answer(prompt) for prompt in prompts]


def test_a_fork_goes_on_for_itself(program, answer):
    session = Session(program)
    session.prefill(text(24, 12))
    fork = session.fork()
    assert session.step(5) == answer([*text(24, 12), 5], 1)[0] and session.is_long and not fork.is_long
    assert fork.step(9) == answer([*text(24, 12), 9], 1)[0]
    of_long = session.fork()
    of_long.rewind(20)
    assert generate(of_long, [7], 4) == answer([*text(24, 12)[:20], 7], 4)


def test_loaded_states_go_on_past_the_length(program, answer):
    session, other = Session(program), Session(program)
    session.prefill(text(22, 23))
    other.take(session.rows(22), text(22, 23))
    assert generate(other, [5], 8) == answer([*text(22, 23), 5], 8)


def test_scores_of_a_prompt_are_those_of_one_pass(model):
    prompt = text(41, 13)
    run(Engine(model[1], 1), request := ask(prompt, max_tokens=0, prompt_logprobs=0))
    wanted = torch.log_softmax(torch.tensor(hf.logits(model[0], prompt)), -1)[range(40), prompt[1:]]
    assert np.abs(np.array([score.logprob for score in request.scores]) - wanted.numpy()).max() < 100 * TOLERANCE


@pytest.mark.parametrize("steps", [True, False])
def test_logits_of_a_text_are_those_of_one_pass(model, program, steps):
    wanted = hf.logits(model[0], text(41, 14))
    for first in (0, 20):
        found = np.array([*bundle_logits(Session(program), steps)(text(41, 14), first)])
        assert np.abs(found - wanted[first:]).max() < TOLERANCE * np.abs(wanted).max()


@pytest.mark.parametrize("count", [4, 2])
def test_verified_tokens_may_cross_the_length(model, program, count):
    """All their logits are then those of the longer text, as in one pass of HF."""
    tokens, session = text(25, 22), Session(program)
    wanted = hf.logits(model[0], tokens)[-count:]
    session.prefill(tokens[:-count])
    _ = session.verify(tokens[-count:]) if count == 4 else session.verify_fewer(tokens[-count:], 4)
    assert np.abs(session.verified_logits() - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_hidden_states_of_a_text_are_those_of_one_pass(model, program):
    tokens = text(41, 15)
    with torch.inference_mode():
        wanted = model[0].model(torch.tensor([tokens])).last_hidden_state[0].numpy()
    assert np.abs(Session(program).embed(tokens) - wanted).max() < TOLERANCE * np.abs(wanted).max()


def test_a_preempted_request_goes_on_with_its_states(model, answer):
    """A request on either side of the length gives its slot to one of higher priority."""
    for length in (12, 30):
        engine = Engine(model[1], 1, single=True)
        stream = engine.stream()
        first, second = ask(text(length, 16), priority=1), ask(text(22, 17))
        stream.submit(first)
        while len(first.tokens) < 3:
            stream.read()
        stream.submit(second)
        list(stream)
        assert [first.tokens, second.tokens] == [answer(text(length, 16)), answer(text(22, 17))]


def test_states_on_disk_are_of_one_kind(model, program, answer, tmp_path):
    store = PrefixStore(tmp_path, model[1].manifest)
    prefix, cached = text(17, 18), []
    for prompt in ([*prefix, *text(20, 19)], [*prefix, 7, 8], [*prefix, *text(15, 20)], [*prefix, 9, 10, 11]):
        run(engine := Engine(Session(program), store=store), request := ask(prompt))
        assert request.tokens == answer(prompt)
        engine.close()
        cached.append(request.cached)
    assert cached[:2] == [0, 0]
    if all(state.kind == "positional" for state in model[1].manifest.states):
        assert cached[2:] == [16, 16]


@pytest.mark.parametrize("length", [15, 20])
def test_a_saved_state_goes_on_on_its_side(model, program, answer, tmp_path, length):
    """The text is saved before (15 + 8) or after (20 + 8) it outgrows the original length."""
    run(engine := Engine(Session(program)), request := ask(text(length, 21), max_tokens=8))
    engine.save_state(tmp_path / "state")
    tokens = [*request.prompt.tolist(), *request.tokens]
    for prompt, is_same in (([*tokens[:-1], 3], True), (tokens[:12], length < 17)):
        other = Engine(Session(program))
        other.load_state(tmp_path / "state")
        run(other, again := ask(prompt))
        assert again.tokens == answer(prompt) and (again.cached > 0) <= is_same
        if len(prompt) > 20 and length == 20:
            assert again.cached == len(tokens) - 1
