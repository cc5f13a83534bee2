"""A draft changes the speed and no token, greedy or sampled."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

import castiron
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.open_model import cached_path
from castiron.pipelines.engine import draft as drafting
from castiron.pipelines.engine.draft import Draft, Guess
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Request
from castiron.pipelines.engine.sampling import Sampler, Sampling
from castiron.pipelines.engine.speculation import Speculator
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.conversation import Chat
from castiron.pipelines.text.generate import check_draft, open_draft
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.reference import tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import TOKENIZER
from castiron.vmfb.run.session import Session
from tests.engine.test_speculate import Parrot
from tests.support import served
from tests.support.fake_session import FakeSession
from tests.support.generating import Generation


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Return a canonical bundle, whose verify functions sum in the order of decode_step."""
    return open_bundle(served.bundle(tmp_path_factory.mktemp("target"), (4, 8), "canonical"))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Another model with the same vocabulary, one layer and half the context."""
    folder = tmp_path_factory.mktemp("draft")
    made = tiny.tiny_model("llama", folder / "checkpoint", seed=5, num_hidden_layers=1)
    served.tokenizer().save(str(made / "tokenizer.json"))
    options = Options(context=served.CONTEXT // 2, batch=(), verify_widths=())
    return open_bundle(compile_model(made, folder / "bundle", options).bundle)


@pytest.fixture
def eager(monkeypatch):
    """Use the draft at every turn, as if it cost nothing."""

    def always(speculator, widest, left):
        if not speculator.draft:
            return []
        speculator._start, _ = speculator.draft.plan(speculator.ngrams.tokens, 1e9)
        return [(float("inf"), "draft", min(widest, left) - 1)]

    monkeypatch.setattr(Speculator, "_draft_options", always)
    monkeypatch.setattr(Speculator, "_rate", lambda speculator, guesses, count, more_seconds=0.0: 1e9 + count)


PROMPT = "Sing a song"
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalised": Sampling(repeat_penalty=1.3, logit_bias={40: 1.5}),
    "all": Sampling(temperature=1.0, seed=1),
    "cut": Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
    "penalised": Sampling(temperature=1.2, repeat_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.2, seed=3),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_draft_does_not_change_the_tokens(target, small, eager, sampling):
    """All proposals are right if the draft is the model itself; another model has wrong ones."""
    session, text = Session(target, 1), load_tokenizer(target)
    prompt = text.encode(PROMPT)
    grammar = text.grammar(regex="([a-e]{3,5}: <=>; ){9}")
    plain = {}
    for proposing in (None, open_draft(target, target, 1), open_draft(small, target, 1)):
        for stored in (None, grammar):
            generation = Generation(
                session, prompt, max_tokens=90, stop_tokens=(), text=text, sampling=sampling, grammar=stored, draft=proposing
            )
            tokens = list(generation)
            assert plain.setdefault(stored, tokens) == tokens
            if proposing:
                reported = generation.speculator.stats["draft"]
                itself = proposing.session.manifest == target.manifest
                assert reported.accepted == reported.proposed > 30 if itself else reported.proposed > reported.accepted
                assert generation.speculator.report()["sources"]["draft"]["proposed"] == reported.proposed
    assert plain[grammar] != plain[None]


class Table(FakeSession):
    """A session whose logits depend on the last token only: `logits[t]` are those after token t."""

    def __init__(self, logits):
        super().__init__()
        self.table, self.vocab = logits, len(logits)

    def logits(self):
        return self.table[self.fed[-1]].copy()


class ParrotDraft(FakeSession):
    """A draft's session over a parrot's text and clock; proposals at indices `wrong` are wrong."""

    vocab = 10**6

    def __init__(self, parrot, wrong, step, read, context):
        super().__init__(context)
        self.parrot, self.wrong, self.costs = parrot, wrong, (step, read)

    def prefill(self, tokens, progress=None, total=0):
        self.parrot.now += self.costs[1] * len(tokens)
        return super().prefill(tokens)

    def step(self, token):
        self.parrot.now += self.costs[0] - self.costs[1]
        return self.prefill([token])

    def logits(self):
        return np.zeros(1)


class CertainDraft(Draft):
    """A draft that is sure of every proposal."""

    def _guess(self, argmax, chooser):
        session, index = self.session, self._start + self.session.position
        known = index < len(session.parrot.text)
        return Guess(session.parrot.text[index] + (index in session.wrong) if known else 0, 1.0)


def ratio(
    right: float,
    costs: dict[int, float],
    step: float,
    read: float,
    prompt: int,
    context: int = 10**6,
    seed: int = 0,
    late: int = 0,
):
    """Return the speed-up of 300 tokens by a draft with this share of `right` proposals.

    100 tokens of the prompt cost as much as 4 steps. The first `late` proposals are wrong.
    """
    random = np.random.default_rng(seed)
    generated = random.integers(0, 5000, prompt + 400).tolist()
    parrot = Parrot(generated)
    parrot.COSTS = costs
    wrong = set(np.flatnonzero(random.random(len(generated)) >= right).tolist())
    wrong |= set(range(prompt + late)) if late else set()
    proposing = CertainDraft(ParrotDraft(parrot, wrong, step, read, context), 10**6, parrot.clock)
    parrot.now = 0.0
    text = Request(generated[:prompt], 10**6, max_tokens=300, stop_tokens=())
    speculator = Speculator(parrot, text, draft=proposing, clock=parrot.clock)
    text.advance(parrot.prefill(generated[:prompt]), parrot.logits)
    parrot.now = prompt * costs[1] * 0.04
    plain = parrot.now + 299 * costs[1]
    while text.finish_reason is None:
        list(speculator.run(text.tokens[-1:]))
    assert text.tokens == generated[prompt : prompt + 300]
    return plain / parrot.now


def test_a_draft_loses_up_to_three_per_cent_and_pays_where_it_is_right():
    cheap, dear = {1: 1.0, 4: 1.3, 8: 1.7}, {1: 1.0, 4: 2.4, 8: 4.5}
    for costs in (cheap, dear):
        for step in (0.05, 0.4, 1.5):
            for right in (0.0, 0.3, 0.6, 1.0):
                for prompt in (10, 300):
                    for context in (200, 10**6):
                        assert ratio(right, costs, step, step / 3, prompt, context) > 0.97
    assert ratio(1.0, cheap, 0.1, 0.03, 40) > 2.3 and ratio(0.8, cheap, 0.1, 0.03, 40) > 1.4
    # Also where checks of proposals are dear, and where the draft is right only later in the text.
    assert ratio(1.0, dear, 0.1, 0.03, 40) > 1.4 and ratio(1.0, cheap, 0.1, 0.03, 40, late=100) > 1.1
    # A draft whose context is shorter than the text reads the end of the text.
    assert ratio(1.0, cheap, 0.1, 0.03, 300, context=200) > 2.2


def test_a_short_text_is_drafted_for_after_the_end_of_a_long_one():
    proposing = Draft(Table(np.eye(16, dtype=np.float32)), 16)
    chooser = SimpleNamespace(done=False, forced=False, pick=lambda argmax, logits: argmax)
    for length, seconds in ((200, drafting.WINDOW * proposing._read_seconds * 1.5), (20, 1e9), (200, 1e9)):
        text = [index % 16 for index in range(length)]
        start, _ = proposing.plan(text, seconds)
        assert 0 <= start < length
        assert [guess.token for guess in proposing.propose(text, start, chooser, lambda _: False)] == text[-1:]


def test_a_conversation_keeps_the_draft_in_step(target, small, eager):
    text, read = load_tokenizer(target), []

    class Counting(Session):
        def prefill(self, tokens, progress=None, total=0):
            read.extend(tokens)
            return super().prefill(tokens, progress, total)

    proposing = Draft(Counting(target, 1), target.manifest.vocab)
    generated = []
    for each in (None, proposing):
        chat = Chat(Engine(Session(target, 1), draft=each), text, max_tokens=8)
        read.clear()
        generated.append(["".join(chat.answer(words)) for words in ("Hi", "And then?", "Why?")])
    assert generated[0] == generated[1] and len(read) <= len(text.encode_chat(chat.messages))


def test_a_draft_serves_single_requests_and_batches_run_without(target, eager, monkeypatch):
    prompts = [served.MESSAGES, "abc", "Sing"]
    plain = {r.index: r.tokens for r in castiron.load(target, threads=1).generate_many(prompts, max_tokens=30)}
    model = castiron.load(target, threads=1, draft=target)
    scheduler = model._engine.scheduler
    passes, steps = [], []
    verify, step = Session.verify, scheduler.batch.step
    monkeypatch.setattr(Session, "verify", lambda self, tokens: passes.append(1) or verify(self, tokens))
    monkeypatch.setattr(scheduler.batch, "step", lambda tokens: steps.append(len(tokens)) or step(tokens))
    for many in ([0], [0, 1, 2], [2]):
        passes.clear()
        results = model.generate_many([prompts[index] for index in many], max_tokens=30)
        assert {many[r.index]: r.tokens for r in results} == {index: plain[index] for index in many}
        # The last of several requests may run alone at the end.
        assert passes or len(many) > 1
    assert max(steps) == 3


def test_commands_and_the_api_take_a_draft(target, small, tmp_path, capsys):
    path, draft = str(target.path), str(small.path)
    argv = ["run", path, "-p", PROMPT, "-n", "20", "--threads", "1", "--json"]
    found = []
    for more in ([], ["--draft-model", draft], ["--draft-model", draft, "--temperature", "1", "--seed", "3"]):
        assert cli.main([*argv, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"] and found[0]["speculation"] is None
    assert set(found[2]["speculation"]["sources"]) == {"ngram", "draft"}
    with castiron.load(path, threads=1, draft=draft) as model:
        assert model.chat(PROMPT, max_tokens=20).tokens == found[0]["tokens"]
    with served.served(target.path, tmp_path / "log", "--draft-model", draft) as running:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "temperature": 0}
        _, _, answer = served.ask(running.url, "/v1/chat/completions", body)
        assert answer["choices"][0]["message"]["content"] == found[0]["text"] and "; draft: weights" in running.errors
    assert cli.main(["serve", path, "--keep-alive", "9", "--draft-model", draft]) == 1
    assert "--draft-model supports neither --keep-alive nor several models" in capsys.readouterr().err


def test_a_checkpoint_given_as_a_draft_is_compiled_for_speed(target, small, capsys):
    checkpoint = small.path.parent / "checkpoint"
    argv = ["run", str(target.path), "-p", PROMPT, "-n", "8", "--threads", "1", "--json"]
    tokens = []
    for more in ([], ["--draft-model", str(checkpoint)]):
        assert cli.main([*argv, *more]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["tokens"])
    assert tokens[0] == tokens[1]
    manifest = open_bundle(cached_path(checkpoint, Options.for_draft())).manifest
    assert (manifest.weights, manifest.numerics) == ("q4_0", "draft") and "q4_0" in manifest.codecs


def bundle_with(tokens=None, vocab=3, verify=(4,), name="x"):
    """Return a bundle as far as `check_draft` reads it; `tokens`: None without a tokenizer."""
    files = {} if tokens is None else {TOKENIZER: SimpleNamespace(sha256=repr(tokens))}
    manifest = SimpleNamespace(encoder=None, vocab=vocab, files=files, widths=lambda role: verify)
    return SimpleNamespace(path=name, manifest=manifest, tokenizer=tokens, tokens=tokens)


def test_rejects_a_draft_with_another_vocabulary(monkeypatch):
    monkeypatch.setattr(
        "castiron.pipelines.text.generate.load_tokenizer",
        lambda bundle: SimpleNamespace(vocabulary=bundle.tokens),
    )
    two, three = [b"a", b"b"], [b"a", b"b", b""]
    target = bundle_with(three)
    for good in (bundle_with(three), bundle_with(two, vocab=2), bundle_with([*three, b""], vocab=4)):
        check_draft(good, target)
    check_draft(bundle_with(), bundle_with())
    for bad, model, message in (
        (bundle_with([b"a", b"c", b""]), target, "different vocabularies from token 1 on"),
        (bundle_with([*two, b"d", b"e"], vocab=4), target, "from token 2 on"),
        (bundle_with(), target, "x has no tokenizer"),
        (bundle_with(vocab=4), bundle_with(), "cannot be compared"),
        (bundle_with(three), bundle_with(three, verify=()), "compile it with --verify-widths 2,4,8"),
    ):
        with pytest.raises(PipelineError, match=message):
            check_draft(bad, model)


def test_a_random_number_near_a_boundary_is_uncertain():
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    logits = np.zeros(4, np.float32)
    for number, sure in ((0.1, True), (0.25 + 1e-6, False), (0.5 - 1e-6, False), (1e-9, True), (1 - 1e-9, True)):
        sampler.number = number
        assert sampler.pick(logits, ()) == (int(number * 4), sure)
