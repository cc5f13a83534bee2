"""Models whose states are no KV cache, through everything that answers: the text is what a fresh run says."""

from __future__ import annotations

import functools
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from castiron.pipelines import cli
from castiron.pipelines.generation.chat import Chat
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.many import generate_many
from castiron.pipelines.generation.prefix_cache import PrefixCache
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Sequence
from castiron.pipelines.generation.speculate import Speculator
from castiron.pipelines.generation.text import load_text
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.session import Session
from tests.families.checkpoints import FAMILIES, HYBRIDS, VOCAB, bundle
from tests.pipelines.served import served

PROMPTS = ["Hello there", "Sing a song of sixpence", "Hello there, how are you today?", "x", "ab" * 12]
COUNT = 24


@pytest.fixture(scope="module", params=[*FAMILIES, *HYBRIDS])
def cast(request, tmp_path_factory):
    return bundle(request.param, "kernels", tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def text(cast):
    return load_text(cast)


@pytest.fixture(scope="module")
def fresh(cast):
    """Greedy tokens after a prompt of ids, one after another from an empty session."""

    @functools.cache
    def tokens(prompt: tuple[int, ...], count: int = COUNT) -> list[int]:
        session = Session(cast, 1)
        for token in prompt:
            found = [session.step(token)]
        while len(found) < count:
            found.append(session.step(found[-1]))
        return found

    return tokens


@pytest.mark.parametrize("packed", [False, True], ids=["directory", "packed"])
def test_run_says_what_a_fresh_session_says(cast, text, fresh, packed, tmp_path, capsys):
    path = cast.path
    if packed:
        path = tmp_path / "model.castiron"
        pack_bundle(cast, path)
    for words in PROMPTS:
        argv = ["run", str(path), "-p", words, "--raw", "-n", str(COUNT), "--ignore-eos", "--threads", "1", "--json"]
        for more in ([], ["--speculate", "ngram"]):
            assert cli.main([*argv, *more]) == 0
            assert json.loads(capsys.readouterr().out)["tokens"] == fresh(tuple(text.encode(words)))


def test_proposed_tokens_are_taken_back(cast, fresh, monkeypatch):
    """Proposals of every length right and wrong: what follows is said as if they had never been fed."""
    prompt, taken = tuple(range(3, 20)), []
    said = fresh(prompt, 40)

    def propose(ngrams, count):
        right = (len(ngrams.tokens) * 7) % (count + 1)
        done = len(ngrams.tokens) - len(prompt)
        following = said[done : done + right]
        return [*following, *[(token + 1) % VOCAB for token in said[done + len(following) :][: count - len(following)]]]

    def plan(speculator):
        left = speculator.text.limit - len(speculator.text.tokens)
        return ("ngram", 3) if left >= 4 and speculator.costs.known else (None, 0)

    monkeypatch.setattr("castiron.pipelines.generation.speculate.Ngrams.propose", propose)
    monkeypatch.setattr(Speculator, "_plan", plan)
    session = Session(cast, 1)
    generation = Generation(session, prompt, max_tokens=40, speculate=True)
    for token in generation:
        taken.append(token)
        if len(taken) == 30:
            break
    assert taken == said[:30] and generation.speculator.accepted > 5 and generation.speculator.passes > 5
    generation.settle()
    assert session.position == len(prompt) + 29
    assert session.step(said[29]) == said[30]


class Counting(Session):
    """A session that notes how many tokens of prompts it reads."""

    read = 0

    def prefill(self, tokens, progress=None):
        self.read += len(tokens)
        return super().prefill(tokens, progress)


def test_a_conversation_goes_on_where_it_can(cast, text):
    """Every turn is what a new session says to all messages so far; what one turn has read the next one reads no more."""
    session = Counting(cast, 1)
    chat = Chat(session, text, max_tokens=9)
    for words in ("Hi", "And then?", "Why?"):
        said = "".join(chat.answer(words))
        alone = Chat(Session(cast, 1), text, max_tokens=9)
        alone.messages = chat.messages[:-2]
        assert said == "".join(alone.answer(words))
    assert len(text.encode_chat(chat.messages)) > session.read


def test_an_answer_that_is_rewritten_costs_no_more_than_itself(cast, text):
    """The end of its prompt is remembered."""
    session = Counting(cast, 1)
    chat = Chat(session, text, max_tokens=9)
    said = "".join(chat.answer("Hello there"))
    prompt = text.encode_chat(chat.messages[:1])
    chat.messages[-1]["content"] = ("x" if said[0] != "x" else "y") + said
    session.read = 0
    again = "".join(chat.answer("Why?"))
    assert session.read == len(text.encode_chat(chat.messages[:3])) - len(prompt)
    alone = Chat(Session(cast, 1), text, max_tokens=9)
    alone.messages = chat.messages[:-2]
    assert again == "".join(alone.answer("Why?"))


def test_many_prompts_at_once_from_one_bundle(cast, text, fresh):
    found = {r.index: r for r in generate_many(cast, PROMPTS * 3, max_tokens=COUNT, stop_tokens=(), threads=1)}
    assert [found[i].tokens for i in range(len(found))] == [fresh(tuple(text.encode(p))) for p in PROMPTS * 3]


def test_beginnings_are_found_where_they_are_remembered(cast, text, fresh):
    """A second prompt that goes on from the first one's end finds it; one that leaves it half-way begins anew."""
    scheduler = Scheduler(cast, 1)
    base = tuple(text.encode("The system message is long enough for what it says to be forgotten"))
    cached = []
    for prompt in (base, (*base, *text.encode("one")), (*base, *text.encode("two")), (*base[:20], 9, 9, 9)):
        sequence = Sequence(prompt, scheduler.context, max_tokens=8)
        scheduler.submit(sequence)
        while not scheduler.idle:
            scheduler.turn()
        assert sequence.tokens == fresh(prompt, 8)
        cached.append(sequence.cached)
    assert cached == [0, len(base), len(base), 0]


def test_a_cache_finds_no_more_than_a_slot_remembers(cast):
    session = Session(cast, 1)
    cache = PrefixCache([session])
    prompt = 3 + np.arange(100) * 7 % 40
    session.prefill(prompt[:50])
    cache.fed(0, prompt[:50])
    assert cache.common(prompt, 0) == 50 and cache.common(prompt[:12], 0) == 0
    session.keep()
    session.prefill(prompt[50:])
    cache.fed(0, prompt[50:])
    assert cache.common(prompt[:60], 0) == 50


def test_a_server_answers_several_at_once(cast, text, fresh, tmp_path):
    with served(cast.path, tmp_path / "log", "--temperature", "0") as running:

        def ask(words: str) -> str:
            body = {"prompt": words, "max_tokens": COUNT, "ignore_eos": True}
            request = urllib.request.Request(
                f"{running.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["choices"][0]["text"]

        for _ in range(2):
            with ThreadPoolExecutor(len(PROMPTS)) as pool:
                answers = list(pool.map(ask, PROMPTS))
            assert answers == [text.decode(fresh(tuple(text.encode(words)))) for words in PROMPTS]


def test_a_fork_of_an_answer_goes_its_own_way(cast, text, fresh):
    prompt = tuple(text.encode(PROMPTS[1]))
    session = Session(cast, 1)
    for token in Generation(session, prompt, max_tokens=5):
        last = token
    other = session.fork()
    assert session.step(4) != -1
    assert [last, *Generation(other, [last], max_tokens=6)] == fresh(prompt)[4:11]


def test_inspect_names_the_states(cast, capsys):
    assert cli.main(["inspect", str(cast.path)]) == 0
    shown = capsys.readouterr().out
    for state in open_bundle(cast.path).manifest.states:
        assert f"{state.name} {state.type()} {state.kind}" in shown
