"""A draft proposes and changes nothing but the speed: tokens, greedy or drawn, are those that come without it."""

from __future__ import annotations

import json
import urllib.request
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.stats import chisquare

import castiron
from castiron.pipelines import cli
from castiron.pipelines.casting.compile import Options, compile_model
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation import draft as drafting
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.generation.draft import Draft, Guess, check_draft, open_draft
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.many import generate_many
from castiron.pipelines.generation.sampling import Sampler, Sampling, candidates
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Sequence
from castiron.pipelines.generation.speculate import Speculator
from castiron.pipelines.generation.text import load_text
from castiron.pipelines.generation.vocabulary import Vocabulary
from castiron.reference import tiny
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.manifest import VOCABULARY
from castiron.vmfb.session import Session
from tests.pipelines import served
from tests.pipelines.test_speculate import Parrot


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return open_bundle(served.bundle(tmp_path_factory.mktemp("target"), (4, 8)))


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Another model with the same tokens, of one layer and half the context."""
    folder = tmp_path_factory.mktemp("draft")
    made = tiny.tiny_model("llama", folder / "checkpoint", seed=5, num_hidden_layers=1)
    served.tokenizer().save(str(made / "tokenizer.json"))
    options = Options(context=served.CONTEXT // 2, batch=(), speculate=())
    return open_bundle(compile_model(made, folder / "bundle", options).bundle)


@pytest.fixture
def eager(monkeypatch):
    """Drafts are asked at every turn, as if they cost nothing."""

    def always(speculator, widest, left, other):
        speculator._trying = True
        speculator._start, _ = speculator.draft.plan(speculator.ngrams.tokens, 1e9)
        return min(widest, left) - 1

    monkeypatch.setattr(Speculator, "_from_draft", always)


PROMPT = "Sing a song"
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalised": Sampling(repeat_penalty=1.3, logit_bias={40: 1.5}),
    "all": Sampling(temperature=1.0, seed=1),
    "cut": Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=2),
    "penalised": Sampling(temperature=1.2, repeat_penalty=1.2, frequency_penalty=0.5, presence_penalty=0.2, seed=3),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_tokens_are_those_without_a_draft(target, small, eager, sampling):
    """Of a draft that is the model itself all proposals are right, of another one few are; both read half the context."""
    session, text = Session(target, 1), load_text(target)
    prompt = text.encode(PROMPT)
    grammar = text.grammar(regex="([a-e]{3,5}: <=>; ){9}")
    plain = {}
    for proposing in (None, open_draft(target, target, 1), open_draft(small, target, 1)):
        for held in (None, grammar):
            session.rewind(0)
            generation = Generation(
                session, prompt, max_tokens=90, stop_tokens=(), text=text, sampling=sampling, grammar=held, draft=proposing
            )
            tokens = list(generation)
            assert plain.setdefault(held, tokens) == tokens
            if proposing:
                told = generation.speculator.told["draft"]
                itself = proposing.session.manifest == target.manifest
                assert told.accepted == told.proposed > 30 if itself else told.proposed > told.accepted
                assert generation.speculator.report()["sources"]["draft"]["proposed"] == told.proposed
    assert plain[grammar] != plain[None]


class Table:
    """A session whose model looks at the last token alone: `logits[t]` are those behind token t."""

    context = 10**6

    def __init__(self, logits):
        self.table, self.vocab, self.manifest = logits, len(logits), self
        self.fed, self.checked = [], []

    def widths(self, role):
        return (4,)

    @property
    def position(self):
        return len(self.fed)

    def prefill(self, tokens, progress=None):
        self.fed += map(int, tokens)
        return int(self.logits().argmax())

    def step(self, token):
        return self.prefill([token])

    def verify(self, tokens):
        self.fed += tokens
        self.checked = tokens
        return [int(self.table[token].argmax()) for token in tokens]

    def logits(self):
        return self.table[self.fed[-1]].copy()

    def verified_logits(self, token):
        return self.table[self.checked[token]].copy()

    def reachable(self, position):
        return position

    def rewind(self, position):
        del self.fed[position:]

    def snapshot(self, ahead=None):
        return SimpleNamespace(position=self.position, stale=False)

    def keep(self):
        pass


@pytest.mark.parametrize("sampling", [Sampling(temperature=1.0, seed=7), Sampling(temperature=0.7, top_k=5, top_p=0.9, seed=8)])
def test_what_is_drawn_has_the_models_distribution(eager, monkeypatch, sampling):
    tables = np.random.default_rng(0).normal(size=(2, 8, 8))
    session, proposing = Table(tables[0]), Table(0.8 * tables[0] + 0.2 * tables[1])

    def drawn():
        """The least probability of what followed one of the tokens, and the share of proposals that were right."""
        session.rewind(0)
        text = Generation(session, [0], max_tokens=6000, stop_tokens=(), sampling=sampling, draft=Draft(proposing, 8))
        tokens, told, found = [0, *text], text.speculator.told["draft"], []
        for token, logits in enumerate(tables[0]):
            order, probability = np.arange(8), np.exp(logits)
            if sampling.top_k:
                order, probability = candidates(logits, sampling)
            probability = probability ** (1 / sampling.temperature)
            counts = np.bincount([b for a, b in zip(tokens, tokens[1:]) if a == token], minlength=8)
            if np.delete(counts, order).any():
                return 0.0, told
            found.append(chisquare(counts[order], probability / probability.sum() * counts.sum()).pvalue)
        return min(found), told

    # The least of 8: one seed in a hundred would fail.
    least, told = drawn()
    assert least > 0.01 / 8 and 0.15 < told.accepted / told.proposed < 0.9
    choose = Speculator._choose

    def credulous(self, found, at):
        argmax, logits, chosen = choose(self, found, at)
        return argmax, logits, found.tokens[at + 1] if at + 1 < len(found.tokens) else chosen

    monkeypatch.setattr(Speculator, "_choose", credulous)
    least, told = drawn()
    assert least < 1e-4 and told.accepted == told.proposed


class Listener:
    """A draft's session over a parrot's text, on its clock, which is wrong in some places, as sure as ever."""

    vocab = 10**6

    def __init__(self, parrot, wrong, step, read, context):
        self.parrot, self.wrong, self.context, self.costs, self.fed = parrot, wrong, context, (step, read), []

    @property
    def position(self):
        return len(self.fed)

    def prefill(self, tokens):
        self.parrot.now += self.costs[1] * len(tokens)
        self.fed += tokens
        assert len(self.fed) <= self.context
        return 0

    def step(self, token):
        self.parrot.now += self.costs[0] - self.costs[1]
        return self.prefill([token])

    reachable, rewind, snapshot = Table.reachable, Table.rewind, Table.snapshot


class Whispering(Draft):
    def _guess(self, argmax, chooser):
        session, place = self.session, self._start + self.session.position
        known = place < len(session.parrot.text)
        return Guess(session.parrot.text[place] + (place in session.wrong) if known else 0, 1.0)


def ratio(right: float, costs: dict[int, float], step: float, read: float, prompt: int, context: int = 10**6, seed: int = 0):
    """How many times as fast a parrot says 300 tokens with a draft that is `right` so often; its prompt costs four steps a
    hundred tokens."""
    random = np.random.default_rng(seed)
    said = random.integers(0, 5000, prompt + 400).tolist()
    parrot = Parrot(said)
    parrot.COSTS = costs
    wrong = set(np.flatnonzero(random.random(len(said)) >= right).tolist())
    proposing = Whispering(Listener(parrot, wrong, step, read, context), 10**6, parrot.clock)
    parrot.now = 0.0
    text = Sequence(said[:prompt], 10**6, max_tokens=300, stop_tokens=())
    speculator = Speculator(parrot, text, draft=proposing, clock=parrot.clock)
    text.advance(parrot.prefill(said[:prompt]))
    parrot.now = speculator.prompt_seconds = prompt * costs[1] * 0.04
    plain = parrot.now + 299 * costs[1]
    while text.finish_reason is None:
        if not speculator.ready:
            speculator.feed(text.tokens[-1:])
        speculator.advance()
    assert text.tokens == said[prompt : prompt + 300]
    return plain / parrot.now


def test_a_draft_costs_at_most_five_per_cent_and_pays_where_it_is_right():
    cheap, dear = {1: 1.0, 4: 1.3, 8: 1.7}, {1: 1.0, 4: 2.4, 8: 4.5}
    for costs in (cheap, dear):
        for step in (0.05, 0.4, 1.5):
            for right in (0.0, 0.3, 0.6, 1.0):
                for prompt in (10, 300):
                    for context in (200, 10**6):
                        assert ratio(right, costs, step, step / 3, prompt, context) > 0.95
    assert ratio(1.0, cheap, 0.1, 0.03, 40) > 1.7 and ratio(0.8, cheap, 0.1, 0.03, 40) > 1.2
    # Its context is shorter than the text: it goes on with the end of it.
    assert ratio(1.0, cheap, 0.1, 0.03, 300, context=200) > 1.4


def test_a_short_text_is_drafted_for_after_the_end_of_a_long_one():
    """Where the draft began in the long one lies behind the short one's end."""
    proposing = Draft(Table(np.eye(16, dtype=np.float32)), 16)
    chooser = SimpleNamespace(done=False, forced=False, pick=lambda argmax, logits: argmax)
    for length, seconds in ((200, drafting.WINDOW * proposing._reading * 1.5), (20, 1e9), (200, 1e9)):
        text = [index % 16 for index in range(length)]
        start, _ = proposing.plan(text, seconds)
        assert 0 <= start < length
        assert [guess.token for guess in proposing.propose(text, start, chooser, lambda _: False)] == text[-1:]


def test_a_conversation_keeps_the_draft_in_step(target, small, eager):
    text, read = load_text(target), []

    class Counting(Session):
        def prefill(self, tokens, progress=None):
            read.extend(tokens)
            return super().prefill(tokens, progress)

    proposing = Draft(Counting(target, 1), target.manifest.vocab)
    said = []
    for each in (None, proposing):
        chat = Chat(Session(target, 1), text, max_tokens=8, draft=each)
        read.clear()
        said.append(["".join(chat.answer(words)) for words in ("Hi", "And then?", "Why?")])
    assert said[0] == said[1] and len(read) <= len(text.encode_chat(chat.messages))


def test_one_request_is_drafted_for_and_several_share_a_batch(target, eager, monkeypatch):
    prompts = [served.MESSAGES, "abc", "Sing"]
    plain = {r.index: r.tokens for r in generate_many(target, prompts, max_tokens=30, threads=1)}
    scheduler = Scheduler(target, 1, draft=open_draft(target, target, 1))
    passes, steps = [], []
    verify, step = Session.verify, scheduler.batch.step
    monkeypatch.setattr(Session, "verify", lambda self, tokens: passes.append(1) or verify(self, tokens))
    monkeypatch.setattr(scheduler.batch, "step", lambda tokens: steps.append(len(tokens)) or step(tokens))
    for several in ([0], [0, 1, 2], [2]):
        passes.clear()
        results = generate_many(scheduler, [prompts[index] for index in several], max_tokens=30)
        assert {several[r.index]: r.tokens for r in results} == {index: plain[index] for index in several}
        # The last of several may be alone at the end.
        assert passes or len(several) > 1
    assert max(steps) == 3


def test_commands_and_the_api_take_one(target, small, tmp_path, capsys):
    path, draft = str(target.path), str(small.path)
    argv = ["run", path, "-p", PROMPT, "-n", "20", "--threads", "1", "--json"]
    found = []
    for more in ([], ["--draft", draft], ["--draft", draft, "--temperature", "1", "--seed", "3"]):
        assert cli.main([*argv, *more]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"] and found[0]["speculation"] is None
    assert set(found[2]["speculation"]["sources"]) == {"ngram", "draft"}
    with castiron.load(path, threads=1, draft=draft) as model:
        assert model.chat(PROMPT, max_tokens=20).tokens == found[0]["tokens"]
    with served.served(target.path, tmp_path / "log", "--draft", draft) as running:
        body = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 20, "temperature": 0}
        request = urllib.request.Request(f"{running.url}/v1/chat/completions", json.dumps(body).encode())
        said = json.loads(urllib.request.urlopen(request).read())["choices"][0]["message"]["content"]
        assert said == found[0]["text"] and "; draft: weights" in running.errors
    assert cli.main(["serve", path, "--keep", "9", "--draft", draft]) == 1
    assert "--draft is for one model" in capsys.readouterr().err


def bundle_with(tokens=None, vocab=3, verify=(4,), name="x"):
    """What `check_draft` looks at; `tokens` are the vocabulary's, None without a tokenizer."""
    files = {} if tokens is None else {VOCABULARY: repr(tokens)}
    manifest = SimpleNamespace(encoder=None, vocab=vocab, files=files, widths=lambda role: verify)
    return SimpleNamespace(path=name, manifest=manifest, tokenizer=tokens, tokens=tokens)


def test_a_draft_that_cannot_be_one_is_refused(monkeypatch):
    monkeypatch.setattr(drafting, "read_vocabulary", lambda bundle: Vocabulary(bundle.tokens, ()))
    two, three = [b"a", b"b"], [b"a", b"b", b""]
    target = bundle_with(three)
    for good in (bundle_with(three), bundle_with(two, vocab=2), bundle_with([*three, b""], vocab=4)):
        check_draft(good, target)
    check_draft(bundle_with(), bundle_with())
    for bad, model, says in (
        (bundle_with([b"a", b"c", b""]), target, "from token 1 on: take a smaller model of the same"),
        (bundle_with([*two, b"d", b"e"], vocab=4), target, "from token 2 on"),
        (bundle_with(), target, "x has no tokenizer"),
        (bundle_with(vocab=4), bundle_with(), "cannot be told"),
        (bundle_with(three), bundle_with(three, verify=()), "compile it with --speculate 4,8"),
    ):
        with pytest.raises(PipelineError, match=says):
            check_draft(bad, model)


def test_random_numbers_are_looked_at_and_used_once():
    plain, looked = (Sampler(Sampling(temperature=1.0, seed=4)) for _ in range(2))
    logits = np.random.default_rng(0).normal(size=300).astype(np.float32)
    expected = [plain.choose(logits, ()) for _ in range(6)]
    assert [looked.pick(logits, (), ahead=i)[0] for i in (3, 0, 1)] == [expected[i] for i in (3, 0, 1)]
    assert [looked.choose(logits, ()) for _ in range(6)] == expected


def test_a_number_near_an_edge_is_in_doubt():
    sampler = Sampler(Sampling(temperature=1.0, seed=0))
    logits = np.zeros(4, np.float32)
    for number, sure in ((0.1, True), (0.25 + 1e-6, False), (0.5 - 1e-6, False), (1e-9, True), (1 - 1e-9, True)):
        sampler._numbers.appendleft(number)
        assert sampler.pick(logits, ()) == (int(number * 4), sure)
