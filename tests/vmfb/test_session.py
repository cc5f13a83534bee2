"""A session says what the model says, whatever way the tokens go in."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.manifest import WEIGHTS
from castiron.vmfb.program import Program
from castiron.vmfb.session import Session, SessionError
from tests.vmfb import toy, toy_bundle
from tests.vmfb.conftest import CONTEXT

TOKENS = np.random.default_rng(3).integers(0, toy.VOCAB, CONTEXT).tolist()


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def session(request, toy_dir):
    return Session(open_bundle(toy_dir), request.param)


def agrees(session: Session, tokens) -> None:
    """The session's logits are those of the model run over `tokens`, and its caches too, as far as they are filled."""
    model = toy.Toy(CONTEXT)
    np.testing.assert_array_equal(session.logits(), model.run(tokens))
    assert session.position == len(tokens)
    for state, expected in zip(session._states, (model.k, model.v), strict=True):
        np.testing.assert_array_equal(state.array[:, : len(tokens)], expected[:, : len(tokens)])


@pytest.mark.parametrize("count", range(1, CONTEXT + 1))
def test_a_prompt_of_any_length_equals_token_by_token(session, count):
    best = session.prefill(TOKENS[:count])
    agrees(session, TOKENS[:count])
    assert best == int(np.argmax(toy.Toy(CONTEXT).run(TOKENS[:count])))


@pytest.mark.parametrize("first", [1, 3, 4, 5, 7, 8, 9, 12, 17, 20, 21, 23])
def test_a_second_prompt_goes_on_where_the_first_ended(session, first):
    for end in (first + 1, CONTEXT):
        session.rewind(0)
        session.prefill(TOKENS[:first])
        session.prefill(TOKENS[first:end])
        agrees(session, TOKENS[:end])


def test_every_position_of_the_context_can_be_stepped_to(session):
    model = toy.Toy(CONTEXT)
    token = TOKENS[0]
    for _ in range(CONTEXT):
        logits = model.step(token)
        token = session.step(token)
        assert token == int(np.argmax(logits))
    with pytest.raises(SessionError, match="1 token from position 24 would end past the context of 24"):
        session.step(0)


def test_rewinding_forgets_what_came_after(session):
    session.prefill(TOKENS)
    session.rewind(5)
    session.prefill(TOKENS[::-1][:7])
    agrees(session, TOKENS[:5] + TOKENS[::-1][:7])


def test_rewinding_leaves_no_logits_of_a_later_token(session):
    session.prefill(TOKENS[:5])
    session.rewind(5)
    agrees(session, TOKENS[:5])
    session.rewind(4)
    with pytest.raises(SessionError, match="no logits yet"):
        session.logits()
    with pytest.raises(SessionError, match="position 4 cannot be rewound to 5"):
        session.rewind(5)


def test_forks_go_their_own_ways(session):
    session.prefill(TOKENS[:9])
    fork = session.fork()
    agrees(fork, TOKENS[:9])
    session.prefill(TOKENS[9:15])
    agrees(fork, TOKENS[:9])
    fork.step(TOKENS[20])
    agrees(fork, [*TOKENS[:9], TOKENS[20]])
    agrees(session, TOKENS[:15])


def test_a_fork_copies_no_more_than_the_position(session):
    session.prefill(TOKENS)
    session.rewind(3)
    assert not any(state.array[:, 3:].any() for state in session.fork()._states)


def test_logits_are_the_callers_own(session):
    session.prefill(TOKENS[:2])
    logits = session.logits()
    session.step(TOKENS[2])
    np.testing.assert_array_equal(logits, toy.Toy(CONTEXT).run(TOKENS[:2]))
    session.logits()[:] = 0
    np.testing.assert_array_equal(session.logits(), toy.Toy(CONTEXT).run(TOKENS[:3]))


def test_a_forks_logits_are_not_its_parents_next(session):
    session.prefill(TOKENS[:8])
    session.step(TOKENS[8])
    fork = session.fork()
    session.step(TOKENS[9])
    agrees(fork, TOKENS[:9])


def test_progress_counts_every_token(session):
    seen = []
    session.prefill(TOKENS[:19], lambda done, total: seen.append((done, total)))
    assert [total for _, total in seen] == [19] * len(seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == 19


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([1, 32], "token 32 is outside the vocabulary of 32"),
        ([-1], "token -1 is outside"),
        ([1.5], "not a list of whole numbers"),
        ([[1], [2]], "not a list of whole numbers"),
        ([1] * 22, "22 tokens from position 3 would end past the context of 24"),
    ],
)
def test_a_bad_prompt_is_refused_before_any_work(session, tokens, message):
    session.prefill(TOKENS[:3])
    with pytest.raises(SessionError, match=message):
        session.prefill(tokens)
    agrees(session, TOKENS[:3])


@pytest.mark.parametrize("token", [-1, 32])
def test_a_bad_token_is_refused(session, token):
    with pytest.raises(SessionError, match=f"token {token} is outside the vocabulary of 32"):
        session.step(token)
    assert session.position == 0


def test_a_session_needs_a_thread(toy_dir):
    with pytest.raises(SessionError, match="threads is 0"):
        Session(open_bundle(toy_dir), 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_ends_in_peace_whoever_holds_the_session(toy_dir, threads, tmp_path):
    """A module imported before IREE, and a cycle, let go of a session after its device."""
    (tmp_path / "holder.py").write_text("")
    (tmp_path / "main.py").write_text(
        f"""
import holder
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session
session = Session(open_bundle({str(toy_dir)!r}), {threads})
session.prefill([1, 2, 3, 4, 5, 6, 7, 8, 9])
session.step(1)
session.itself = session
holder.session = session
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    for _ in range(3):
        ended = subprocess.run([sys.executable, tmp_path / "main.py"], env=environment, capture_output=True)
        assert (ended.returncode, ended.stderr) == (0, b"")


def resident() -> int:
    """Bytes of memory of this process that are no file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def in_small_pages(address: int) -> bool:
    """Whether the memory there may not be in large pages, which some systems give unasked."""
    there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            there = int(found[1], 16) <= address < int(found[2], 16)
        elif there and line.startswith("VmFlags:"):
            return "nh" in line.split()
    return False


def test_a_buffer_costs_memory_as_it_is_filled(toy_dir):
    program = Program(open_bundle(toy_dir), 1)
    before = resident()
    buffer = program.zeros((4, 2**24, 1, 4), "f32")
    assert resident() - before < 2**21
    buffer.array[:, :1000] = 1
    assert resident() - before < 2**22
    assert buffer.array.nbytes == 2**30
    # Whatever this system does.
    assert in_small_pages(buffer.array.ctypes.data) or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_weights_are_mapped_not_copied(tmp_path, monkeypatch, compile_cache):
    """With a vocabulary that makes the weights 32 MB, a step costs its logits (4 MB) and little more."""
    monkeypatch.setattr(toy, "VOCAB", 2**20)
    bundle = toy_bundle.write(tmp_path / "large", CONTEXT, (), cache_dir=compile_cache)
    before = resident()
    session = Session(bundle, 1)
    session.step(2**20 - 1)
    assert (tmp_path / "large" / WEIGHTS).stat().st_size > 2**25
    assert resident() - before < 10 * 2**20
    np.testing.assert_array_equal(session.logits(), toy.Toy(CONTEXT).run([2**20 - 1]))


@pytest.mark.parametrize("call", ["step", "prefill", "rewind", "logits", "snapshot", "fork", "copy"])
def test_a_session_is_refused_to_a_second_thread_and_stays_as_it_is(session, call):
    """While one thread is within a prompt, another cannot touch the session nor a fork of it."""
    session.prefill(TOKENS[:4])
    fork = session.fork()
    calls = {
        "step": lambda: fork.step(1), "prefill": lambda: session.prefill([1]), "rewind": lambda: session.rewind(0),
        "logits": session.logits, "snapshot": session.snapshot, "fork": session.fork, "copy": lambda: fork.copy_from(session, 0),
    }  # fmt: skip
    failures = []

    def intrude() -> None:
        try:
            calls[call]()
        except SessionError as error:
            failures.append(str(error))

    def progress(done: int, total: int) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    session.prefill(TOKENS[4:20], progress)
    assert len(failures) >= 2 and all("another thread is running this session" in failure for failure in failures)
    agrees(session, TOKENS[:20])
    agrees(fork, TOKENS[:4])
    calls[call]()


def test_sessions_of_their_own_run_in_threads_of_their_own(toy_dir):
    """Over one device, with nothing of each other's."""
    results: dict[int, list[int]] = {}

    def run(number: int) -> None:
        own = Session(open_bundle(toy_dir), 2)
        results[number] = []
        for _ in range(20):
            own.rewind(0)
            results[number].append(own.prefill(TOKENS[number:20]))

    threads = [threading.Thread(target=run, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [int(np.argmax(toy.Toy(CONTEXT).run(TOKENS[n:20])))] * 20 for n in range(3)}


FORKING = """
import multiprocessing, os, signal, sys
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session, SessionError
session = Session(open_bundle({place!r}), {threads})
session.prefill({first})

def child(queue):
    signal.alarm(200)
    try:
        inherited = session.prefill({rest})
    except SessionError as error:
        inherited = str(error)
    own = Session(open_bundle({place!r}), {threads})
    own.prefill({first})
    queue.put((inherited, own.prefill({rest})))

forking = multiprocessing.get_context("fork")
queue = forking.SimpleQueue()
process = forking.Process(target=child, args=(queue,))
process.start()
process.join()
assert process.exitcode == 0, process.exitcode
print(queue.get())
print(session.prefill({rest}))
if not os.fork():
    signal.alarm(200)
    sys.exit(0)
print(os.wait()[1])
"""


@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_is_told_and_can_make_a_session_of_its_own(toy_dir, threads):
    """What needs the parent's workers is refused, where it hung before; what needs none goes on."""
    code = FORKING.format(place=str(toy_dir), threads=threads, first=TOKENS[:9], rest=TOKENS[9:15])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    best = int(np.argmax(toy.Toy(CONTEXT).run(TOKENS[:15])))
    told, parents, ended = done.stdout.splitlines()
    inherited, own = ast.literal_eval(told)
    assert own == int(parents) == best and ended == "0"
    assert inherited == best if threads == 1 else "before the process was forked" in inherited


def test_logits_that_are_no_numbers_end_the_call(tmp_path, monkeypatch):
    none = {name: np.full_like(array, np.nan) for name, array in toy.weights().items()}
    monkeypatch.setattr(toy, "weights", lambda: none)
    session = Session(toy_bundle.write(tmp_path / "bundle", 16, (4,)), 1)
    for call in (lambda: session.step(1), lambda: session.prefill([1, 2, 3])):
        with pytest.raises(SessionError, match="logits are not numbers"):
            call()
