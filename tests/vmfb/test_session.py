"""A session computes the same as the model in NumPy, in whichever calls the tokens are appended."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import iree.runtime as rt
import numpy as np
import pytest

from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import WEIGHTS
from castiron.vmfb.device.cpu_device import vm_instance
from castiron.vmfb.device.program import Program
from castiron.vmfb.run.session import Session, SessionError
from tests.vmfb import toy
from tests.vmfb.toy import CONTEXT

TOKENS = np.random.default_rng(3).integers(0, toy.VOCAB, CONTEXT).tolist()


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def session(request, toy_dir):
    return Session(open_bundle(toy_dir), request.param)


def agrees(session: Session, tokens) -> None:
    """Assert that the session has the logits and caches of the model after `tokens`."""
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


@pytest.mark.parametrize("first", [1, 4, 7, 9, 17, 23])
def test_a_second_prompt_continues_the_first(session, first):
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


def test_rewinding_removes_later_tokens(session):
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
    with pytest.raises(SessionError, match="cannot rewind a session at position 4 to 5"):
        session.rewind(5)


def test_forks_are_independent(session):
    session.prefill(TOKENS[:8])
    session.step(TOKENS[8])
    fork = session.fork()
    session.step(TOKENS[9])
    session.prefill(TOKENS[10:15])
    agrees(fork, TOKENS[:9])
    fork.step(TOKENS[20])
    agrees(fork, [*TOKENS[:9], TOKENS[20]])
    agrees(session, TOKENS[:15])
    session.rewind(3)
    assert not any(state.array[:, 3:].any() for state in session.fork()._states)


def test_logits_are_a_copy(session):
    session.prefill(TOKENS[:2])
    logits = session.logits()
    session.step(TOKENS[2])
    np.testing.assert_array_equal(logits, toy.Toy(CONTEXT).run(TOKENS[:2]))
    session.logits()[:] = 0
    np.testing.assert_array_equal(session.logits(), toy.Toy(CONTEXT).run(TOKENS[:3]))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "no tokens"),
        ([1, 32], "token 32 is outside the vocabulary of 32"),
        ([-1], "token -1 is outside"),
        ([1.5], "give a list of integers"),
        ([[1], [2]], "give a list of integers"),
        ([1] * 22, "22 tokens from position 3 would end past the context of 24"),
    ],
)
def test_rejects_a_bad_prompt_before_any_work(session, tokens, message):
    session.prefill(TOKENS[:3])
    with pytest.raises(SessionError, match=message):
        session.prefill(tokens)
    for token in (-1, 32):
        with pytest.raises(SessionError, match=f"token {token} is outside the vocabulary of 32"):
            session.step(token)
    agrees(session, TOKENS[:3])


def test_a_session_needs_a_thread(toy_dir):
    with pytest.raises(SessionError, match="threads is 0"):
        Session(open_bundle(toy_dir), 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_process_exits_cleanly_with_a_session(toy_dir, threads, tmp_path):
    """An earlier module, a cycle and a daemon thread refer to the session."""
    (tmp_path / "holder.py").write_text("")
    (tmp_path / "main.py").write_text(
        f"""
import threading, time, holder
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session
session = Session(open_bundle({str(toy_dir)!r}), {threads})
session.prefill([1, 2, 3, 4, 5, 6, 7, 8, 9])
session.step(1)
session.itself = session
holder.session = session
threading.Thread(target=lambda held: time.sleep(100), args=(session,), daemon=True).start()
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    for _ in range(2):
        ended = subprocess.run([sys.executable, tmp_path / "main.py"], env=environment, capture_output=True)
        assert (ended.returncode, ended.stderr) == (0, b"")


def resident() -> int:
    """Return the bytes of this process's memory that do not belong to files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def in_small_pages(address: int) -> bool:
    """Return whether the system may not use large pages for the memory at this address."""
    found_range = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            found_range = int(found[1], 16) <= address < int(found[2], 16)
        elif found_range and line.startswith("VmFlags:"):
            return "nh" in line.split()
    return False


def test_a_buffer_uses_memory_as_it_is_filled(toy_dir):
    program = Program(open_bundle(toy_dir), 1)
    before = resident()
    buffer = program.zeros((4, 2**24, 1, 4), "f32")
    assert resident() - before < 2**21
    buffer.array[:, :1000] = 1
    assert resident() - before < 2**22
    assert buffer.array.nbytes == 2**30
    # This holds whether or not the system uses large pages by default.
    assert in_small_pages(buffer.array.ctypes.data) or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_weights_are_mapped_not_copied(tmp_path, monkeypatch, compile_cache):
    """With weights of 32 MB, a step uses memory for its logits (4 MB) and little more."""
    monkeypatch.setattr(toy, "VOCAB", 2**20)
    bundle = toy.write(tmp_path / "large", widths=(), cache_dir=compile_cache)
    before = resident()
    session = Session(bundle, 1)
    session.step(2**20 - 1)
    assert (tmp_path / "large" / WEIGHTS).stat().st_size > 2**25
    assert resident() - before < 10 * 2**20
    np.testing.assert_array_equal(session.logits(), toy.Toy(CONTEXT).run([2**20 - 1]))


@pytest.mark.parametrize("call", ["step", "prefill", "rewind", "logits", "snapshot", "fork", "copy"])
def test_rejects_a_second_thread(session, call):
    """While a thread runs a prompt, another one can use neither the session nor a fork of it."""
    session.prefill(TOKENS[:4])
    fork, failures = session.fork(), []
    calls = {
        "step": lambda: fork.step(1), "prefill": lambda: session.prefill([1]), "rewind": lambda: session.rewind(0),
        "logits": session.logits, "snapshot": session.snapshot, "fork": session.fork, "copy": lambda: fork.copy_from(session, 0),
    }  # fmt: skip

    def progress(done: int, total: int) -> None:
        with ThreadPoolExecutor() as pool, pytest.raises(SessionError, match="another thread is using this session"):
            pool.submit(calls[call]).result()
        failures.append((done, total))

    session.prefill(TOKENS[4:20], progress)
    assert failures == [(8, 16), (16, 16)]
    agrees(session, TOKENS[:20])
    agrees(fork, TOKENS[:4])
    calls[call]()


def test_threads_can_run_separate_sessions(toy_dir):
    """The sessions share a device."""

    def run(number: int) -> list[int]:
        session, found = Session(open_bundle(toy_dir), 2), []
        for _ in range(20):
            session.rewind(0)
            found.append(session.prefill(TOKENS[number:20]))
        return found

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [[int(np.argmax(toy.Toy(CONTEXT).run(TOKENS[n:20])))] * 20 for n in range(3)]


def test_programs_share_the_runtime_instance(toy_dir, monkeypatch):
    """A second instance would change variables that calls in other threads read."""
    vm_instance()
    monkeypatch.setattr(rt, "VmInstance", lambda: pytest.fail("a second instance"))
    assert Session(open_bundle(toy_dir), 2).prefill(TOKENS[:9]) == int(np.argmax(toy.Toy(CONTEXT).run(TOKENS[:9])))


def test_the_runtime_never_frees_an_object_of_python(toy_dir, monkeypatch):
    """A worker without the GIL may drop the runtime's last reference to the weights."""
    wrap, given = rt.FileHandle.wrap_memory, []
    monkeypatch.setattr(rt.FileHandle, "wrap_memory", lambda memory: (given.append(weakref.ref(memory)), wrap(memory))[1])
    session = Session(open_bundle(toy_dir), 2)
    session.prefill(TOKENS[:9])
    mapped = weakref.ref(session.program._mapped)
    del session
    gc.collect()
    assert mapped() is None and len(given) == 1
    assert given[0]() is not None


FORKING = """
import multiprocessing, os, signal, sys
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session, SessionError
session = Session(open_bundle({path!r}), {threads})
session.prefill({first})

def child(queue):
    signal.alarm(200)
    try:
        inherited = session.prefill({rest})
    except SessionError as error:
        inherited = str(error)
    own = Session(open_bundle({path!r}), {threads})
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
def test_a_forked_child_needs_a_new_session(toy_dir, threads):
    """A session with one thread works in a child; one with workers is rejected."""
    code = FORKING.format(path=str(toy_dir), threads=threads, first=TOKENS[:9], rest=TOKENS[9:15])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    best = int(np.argmax(toy.Toy(CONTEXT).run(TOKENS[:15])))
    printed, parents, ended = done.stdout.splitlines()
    inherited, own = ast.literal_eval(printed)
    assert own == int(parents) == best and ended == "0"
    assert inherited == best if threads == 1 else "cannot use this session after a fork" in inherited


def test_nan_logits_are_an_error(tmp_path, monkeypatch, compile_cache):
    nans = {name: np.full_like(array, np.nan) for name, array in toy.weights().items()}
    monkeypatch.setattr(toy, "weights", lambda: nans)
    session = Session(toy.write(tmp_path / "bundle", widths=(4,), cache_dir=compile_cache), 1)
    for call in (lambda: session.step(1), lambda: session.prefill([1, 2, 3])):
        with pytest.raises(SessionError, match="logits are NaN"):
            call()
