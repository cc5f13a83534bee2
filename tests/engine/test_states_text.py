"""Recurrent and windowed models: every way to generate gives the tokens of a fresh session."""

from __future__ import annotations

import functools

import pytest

from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.request import Request
from castiron.pipelines.engine.speculation import Speculator
from castiron.pipelines.text.conversation import Chat
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.run.session import Session
from tests.families.checkpoints import FAMILIES, HYBRIDS, VOCAB, bundle
from tests.support.generating import Generation, generate_many

PROMPTS = ["Hello there", "Sing a song of sixpence", "Hello there, how are you today?", "x", "ab" * 12]
COUNT = 24


@pytest.fixture(scope="module", params=[*FAMILIES, *HYBRIDS])
def compiled(request, tmp_path_factory):
    return bundle(request.param, "kernels", tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def text(compiled):
    return load_tokenizer(compiled)


@pytest.fixture(scope="module")
def fresh(compiled):
    """Return the greedy tokens after a prompt of ids, by steps from an empty session."""

    @functools.cache
    def tokens(prompt: tuple[int, ...], count: int = COUNT) -> list[int]:
        session = Session(compiled, 1)
        for token in prompt:
            found = [session.step(token)]
        while len(found) < count:
            found.append(session.step(found[-1]))
        return found

    return tokens


def test_wrong_proposals_are_rewound(compiled, fresh, monkeypatch):
    """Wrong proposals, after any number of right ones, leave no trace in the states."""
    prompt = tuple(range(3, 20))
    generated = fresh(prompt, 40)

    def propose(ngrams, count):
        right = (len(ngrams.tokens) * 7) % (count + 1)
        done = len(ngrams.tokens) - len(prompt)
        following = generated[done : done + right]
        return [*following, *[(token + 1) % VOCAB for token in generated[done + len(following) :][: count - len(following)]]]

    def plan(speculator):
        left = speculator.request.limit - len(speculator.request.tokens)
        return ("ngram", 3) if left >= 4 and speculator.costs.known else (None, 0)

    monkeypatch.setattr("castiron.pipelines.engine.speculation.Ngrams.propose", propose)
    monkeypatch.setattr(Speculator, "_plan", plan)
    session = Session(compiled, 1)
    generation = Generation(session, prompt, max_tokens=40, speculate=True)
    assert list(generation) == generated and generation.speculator.accepted > 5 and generation.speculator.passes > 5
    assert session.position == len(prompt) + 39
    assert session.step(generated[39]) == fresh(prompt, 41)[40]


class Counting(Session):
    """A session that counts the prompt tokens that it reads."""

    read = 0

    def prefill(self, tokens, progress=None, total=0):
        self.read += len(tokens)
        return super().prefill(tokens, progress, total)


def test_a_conversation_continues_from_its_states(compiled, text):
    """Every turn has the answer of a new session, and reads only new tokens."""
    session = Counting(compiled, 1)
    chat = Chat(Engine(session), text, max_tokens=9)
    for words in ("Hi", "And then?", "Why?"):
        generated = "".join(chat.answer(words))
        by_itself = Chat(Engine(compiled, 1, single=True), text, max_tokens=9)
        by_itself.messages = chat.messages[:-2]
        assert generated == "".join(by_itself.answer(words))
    assert len(text.encode_chat(chat.messages)) > session.read


def test_a_rewritten_answer_is_read_from_the_end_of_its_prompt(compiled, text):
    session = Counting(compiled, 1)
    chat = Chat(Engine(session), text, max_tokens=9)
    generated = "".join(chat.answer("Hello there"))
    prompt = text.encode_chat(chat.messages[:1])
    chat.messages[-1]["content"] = ("x" if generated[0] != "x" else "y") + generated
    session.read = 0
    again = "".join(chat.answer("Why?"))
    assert session.read == len(text.encode_chat(chat.messages[:3])) - len(prompt)
    by_itself = Chat(Engine(compiled, 1, single=True), text, max_tokens=9)
    by_itself.messages = chat.messages[:-2]
    assert again == "".join(by_itself.answer("Why?"))


def test_many_prompts_at_once_from_one_bundle(compiled, text, fresh):
    found = {r.index: r for r in generate_many(Engine(compiled, 1), PROMPTS * 3, text=text, max_tokens=COUNT, stop_tokens=())}
    assert [found[i].tokens for i in range(len(found))] == [fresh(tuple(text.encode(p))) for p in PROMPTS * 3]


def test_finds_prefixes_in_snapshots(compiled, text, fresh):
    """Prompts that continue the first one find its states; a prompt with a part of it does not."""
    engine = Engine(compiled, 1)
    base = tuple(text.encode("The system message is long enough for what it says to be forgotten"))
    cached = []
    for prompt in (base, (*base, *text.encode("one")), (*base, *text.encode("two")), (*base[:20], 9, 9, 9)):
        request = Request(prompt, engine.context, max_tokens=8)
        list(engine.submit(request))
        assert request.tokens == fresh(prompt, 8)
        cached.append(request.cached)
    assert cached == [0, len(base), len(base), 0]
