"""States of long prefixes on disk: a run from one has the bits of a run without it."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.engine import prefix_store
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.engine.prefix_store import MIN_CHUNKS, PrefixStore
from castiron.pipelines.engine.request import Request
from castiron.pipelines.text.conversation import STATE, Chat
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.manifest import MODEL, WEIGHTS
from castiron.vmfb.run.session import Session
from castiron.vmfb.run.state_file import identity, read_head, read_rows, write_state
from tests.families.checkpoints import VOCAB, bundle
from tests.support import served

TOKENS = np.random.default_rng(23).integers(3, VOCAB, 110)
OTHERS = np.random.default_rng(24).integers(3, VOCAB, 110)
# Shares its first 77 tokens with TOKENS.
PARTS = np.concatenate([TOKENS[:77], OTHERS[77:]])
LETTERS = "".join(served.LETTERS[i % 90 + 1] for i in range(100))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Bundle:
    return open_bundle(served.bundle(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module", params=["llama", "lfm2", "ring"])
def compiled(request, llama, tmp_path_factory) -> Bundle:
    """Return a bundle with positional, with positional and recurrent, or with window states."""
    return llama if request.param == "llama" else bundle(request.param, "kernels", tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def program(compiled):
    return Session(compiled, 1).program


def recurrent(compiled: Bundle) -> bool:
    return any(state.kind == "recurrent" for state in compiled.manifest.states)


def stored(compiled: Bundle, folder: Path, **options) -> PrefixStore:
    """Return a new store of the folder, as another process has it."""
    return PrefixStore(folder / "states", compiled.manifest, **options)


def save(store: PrefixStore, session: Session, prompt: np.ndarray) -> None:
    """Store the state after the shortest prefix of a prompt that may be stored."""
    prefix = prompt[: store.width * MIN_CHUNKS]
    session.prefill(prefix)
    assert store.save(session, prefix).result()


def read(session: Session, store: PrefixStore | None, prompt: np.ndarray) -> int:
    """Read a prompt as castiron run does; return how many of its tokens the store had."""
    known = store.take(session, prompt) if store else 0
    session.prefill(prompt[known:], progress=lambda *_: store and store.offer(session, prompt))
    if store:
        store.finish()
    return known


def generate_from(session: Session, store: PrefixStore | None, prompt: np.ndarray) -> tuple[int, list[bytes]]:
    """Return how many tokens were stored, and the bytes of the logits of the next six tokens."""
    known, found = read(session, store, prompt), []
    for _ in range(6):
        logits = session.logits()
        found.append(logits.tobytes())
        session.step(int(logits.argmax()))
    return known, found


def test_a_run_from_a_state_is_the_run_without_it_to_the_last_bit(compiled, program, tmp_path):
    store = stored(compiled, tmp_path)
    last = (len(TOKENS) - 1) // store.width * store.width
    assert last >= MIN_CHUNKS * store.width
    _, expected = generate_from(Session(program), None, TOKENS)
    assert generate_from(Session(program), store, TOKENS) == (0, expected)
    again = stored(compiled, tmp_path)
    assert generate_from(Session(program), again, TOKENS) == (last, expected)
    used = Session(program)
    used.prefill(OTHERS[:50])
    assert generate_from(used, again, TOKENS) == (last, expected)
    assert len(list(store.folder.iterdir())) == 1, "an existing state is not written again"


def test_prompts_share_a_stored_prefix(compiled, program, tmp_path):
    """A recurrent state is stored where two prompts diverge; other states can be cut there."""
    common = 77 // stored(compiled, tmp_path).width * stored(compiled, tmp_path).width
    _, expected = generate_from(Session(program), None, PARTS)
    read(Session(program), stored(compiled, tmp_path), TOKENS)
    assert generate_from(Session(program), stored(compiled, tmp_path), PARTS) == (
        0 if recurrent(compiled) else common,
        expected,
    )
    third = np.concatenate([TOKENS[:77], OTHERS[:20]])
    known, found = generate_from(Session(program), stored(compiled, tmp_path), third)
    assert (known, found) == (common, generate_from(Session(program), None, third)[1])


def test_does_not_store_positions_that_a_ring_has_overwritten(compiled, program, tmp_path):
    """A session that went further and returned has overwritten the first rows of its window."""
    session, store = Session(program), stored(compiled, tmp_path)
    location = (len(TOKENS) - 1) // store.width * store.width
    session.prefill(TOKENS[:location])
    assert session.settled and session.chunked_tokens == location
    snapshot = session.snapshot()
    session.prefill(OTHERS[:3])
    session.restore(snapshot)
    store.offer(session, TOKENS)
    store.finish()
    rings = any(state.kind == "window" for state in compiled.manifest.states)
    assert session.settled != rings and len(list(store.directory.glob("*/*"))) == (not rings)


def test_states_of_other_processes_are_found_and_removed_ones_forgotten(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(prefix_store, "LISTED_SECONDS", 0)
    store, session = stored(llama, tmp_path), Session(llama, 1)
    assert store.lookup(session, OTHERS) == 0
    other = stored(llama, tmp_path)
    save(other, Session(llama, 1), OTHERS)
    assert store.lookup(session, OTHERS) == store.width * MIN_CHUNKS
    for path in store.folder.iterdir():
        path.unlink()
    assert store.lookup(session, OTHERS) == 0


def test_a_running_answer_does_not_wait_for_the_disk(llama, tmp_path, monkeypatch):
    """A thread reads the state while other requests decode."""
    store = stored(llama, tmp_path)
    save(store, Session(llama, 1), TOKENS)
    threads, let = [], threading.Event()

    def slowly(*arguments):
        threads.append(threading.current_thread())
        assert let.wait(60)
        return read_rows(*arguments)

    monkeypatch.setattr(prefix_store, "read_rows", slowly)
    scheduler = Engine(llama, 1, store=store).scheduler
    running, comes = (Request(p, scheduler.context, max_tokens=9, stop_tokens=()) for p in (OTHERS[:5], TOKENS))
    scheduler.submit(running)
    scheduler.turn()
    scheduler.submit(comes)
    for _ in range(3):
        scheduler.turn()
    assert len(running.tokens) == 5 and not comes.timing.started and threading.current_thread() not in threads
    let.set()
    while not scheduler.idle:
        scheduler.turn()
    assert comes.cached == store.width * MIN_CHUNKS and len(threads) == 1


def test_stores_a_prompt_that_is_read_while_a_request_decodes(llama, tmp_path):
    """The prompts share five tokens, which the second one reads again to begin with a full chunk."""
    store = stored(llama, tmp_path)
    scheduler = Engine(llama, 1, store=store).scheduler
    other = np.concatenate([TOKENS[:5], OTHERS[:5]])
    running, comes = (
        Request(prompt, scheduler.context, max_tokens=count, stop_tokens=()) for prompt, count in ((other, 60), (TOKENS, 9))
    )
    scheduler.submit(running)
    scheduler.turn()
    scheduler.submit(comes)
    while not comes.tokens:
        scheduler.turn()
    store.finish()
    assert not running.finish_reason and comes.cached == 0
    assert store.lookup(Session(llama, 1), TOKENS) == (len(TOKENS) - 1) // store.width * store.width


def test_stores_states_of_complete_chunks_only(llama, tmp_path):
    """Other states would have other bits than a run from the start."""
    session, store = Session(llama, 1), stored(llama, tmp_path)
    session.prefill(TOKENS[:5])
    session.prefill(TOKENS[5:64])
    assert session.position == 64 and session.chunked_tokens == 0
    store.offer(session, TOKENS)
    session.rewind(0)
    session.prefill(TOKENS[:96])
    complete = 96 // session.widest * session.widest
    assert session.chunked_tokens == complete
    session.rewind(complete - 1)
    assert session.chunked_tokens == complete - session.widest
    assert not store.folder.exists()


def test_reports_a_damaged_state_and_reads_the_prompt_again(llama, tmp_path, capsys):
    program = Session(llama, 1).program
    _, expected = generate_from(Session(program), stored(llama, tmp_path), TOKENS)
    (path,) = stored(llama, tmp_path).folder.glob("[!.]*")
    complete = path.read_bytes()
    for location in (0, 30, 90, 100, 300, len(complete) // 2, len(complete) - 1):
        path.write_bytes(complete[:location] + bytes([complete[location] ^ 1]) + complete[location + 1 :])
        assert generate_from(Session(program), stored(llama, tmp_path), TOKENS) == (0, expected), location
        # A changed token is the token of another prompt, so nothing is reported.
        assert location == 300 or "computes these tokens again" in capsys.readouterr().err, location
        path.unlink(missing_ok=True)
    for wrong in (complete[:-64], complete + bytes(64), complete[:200], b""):
        path.write_bytes(wrong)
        assert generate_from(Session(program), stored(llama, tmp_path), TOKENS) == (0, expected)
        assert "computes these tokens again" in capsys.readouterr().err
        assert path.read_bytes() == complete, "the state is written again"


def test_rejects_a_state_of_a_different_bundle(compiled, llama, tmp_path, capsys):
    if compiled is llama:
        compiled = bundle("ring", "kernels", tmp_path)
    mine, others = stored(llama, tmp_path), stored(compiled, tmp_path)
    read(Session(llama, 1), mine, TOKENS)
    (path,) = mine.folder.iterdir()
    others.folder.mkdir()
    os.rename(path, others.folder / path.name)
    assert read(Session(compiled, 1), stored(compiled, tmp_path), TOKENS) == 0
    assert "is a state of another bundle; delete the file; castiron computes these tokens again" in capsys.readouterr().err


def test_states_depend_on_the_program_and_the_weights(llama):
    files = llama.manifest.files
    others = [
        replace(llama.manifest, files={**files, name: replace(files[name], sha256="0" * 64)}) for name in (MODEL, WEIGHTS)
    ]
    assert len({identity(manifest) for manifest in (llama.manifest, *others)}) == 3


def test_evicts_the_states_unused_longest(llama, tmp_path):
    program, prompts = Session(llama, 1).program, [np.roll(TOKENS, n) for n in range(4)]
    read(Session(program), stored(llama, tmp_path), prompts[0])
    (path,) = stored(llama, tmp_path).folder.glob("[!.]*")
    size = path.stat().st_size
    limit = int(2.5 * size)
    for day, prompt in enumerate(prompts[:2]):
        read(Session(program), stored(llama, tmp_path, max_bytes=limit), prompt)
        for state in path.parent.glob("[!.]*"):
            os.utime(state, (day, day + (state == path)))
    # A temporary file of a killed process, and a file that is not a state.
    (path.parent / ".x.state.castiron-0123abcd").mkdir()
    (tmp_path / "states" / "mine").write_text("mine")
    read(Session(program), stored(llama, tmp_path, max_bytes=limit), prompts[2])
    assert len(list(path.parent.glob("[!.]*"))) == 2 and path.exists() and (tmp_path / "states" / "mine").exists()
    known = [stored(llama, tmp_path).lookup(Session(program), prompt) > 0 for prompt in prompts]
    assert known == [True, False, True, False]
    assert read(Session(program), stored(llama, tmp_path, max_bytes=size - 1), prompts[3]) == 0
    assert len(list(path.parent.glob("[!.]*"))) == 2


def test_evicts_no_files_of_others(llama, tmp_path):
    """A directory of the user's may have folders and files with names like those of states."""
    directory = tmp_path / "states"
    outside = tmp_path / "outside"
    names = [directory / "save" / f"{'0' * 32}.state", directory / ("a" * 32) / "game.state", outside / f"{'1' * 32}.state"]
    for path in names:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1000))
        os.utime(path, (0, 0))
    (directory / ("b" * 32)).symlink_to(outside)
    session = Session(llama, 1)
    read(session, stored(llama, tmp_path), TOKENS)
    size = next(stored(llama, tmp_path).folder.iterdir()).stat().st_size
    session.rewind(0)
    read(session, stored(llama, tmp_path, max_bytes=size), OTHERS)
    assert all(path.exists() for path in names) and len(list(stored(llama, tmp_path).folder.iterdir())) == 1


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_only_the_owner_can_read_a_state(llama, tmp_path, umask):
    """Also in a directory that existed before, and in the folder of a bundle that others could read."""
    session, store = Session(llama, 1), stored(llama, tmp_path)
    store.directory.chmod(0o777)
    if umask != 0o022:
        store.folder.mkdir(mode=0o755)
        store.folder.chmod(0o755)
    before = os.umask(umask)
    try:
        read(session, store, TOKENS)
        session.rewind(0)
        read(session, PrefixStore(tmp_path / "new" / "states", llama.manifest), TOKENS)
    finally:
        os.umask(before)
    mode = lambda path: path.stat().st_mode & 0o777
    assert mode(store.directory) == 0o777, "the mode of the user's directory is the user's"
    assert mode(tmp_path / "new" / "states") == 0o700
    for directory in (store.directory, tmp_path / "new" / "states"):
        (folder,) = directory.iterdir()
        assert mode(folder) == 0o700 and [mode(path) for path in folder.iterdir()] == [0o600]


def test_a_prompt_reuses_states_of_its_own_salt_only(llama, tmp_path):
    """Also after a restart; without a salt, states of no salt are used."""
    salts, session = ("", "a", "b"), Session(llama, 1)
    for salt in salts:
        engine = Engine(llama, 1, store=stored(llama, tmp_path))
        found = []
        for other in salts:
            request = Request(TOKENS, engine.context, max_tokens=1, cache_salt=other)
            list(engine.submit(request))
            found.append(request.cached > 0)
            engine.scheduler.cache.store.finish()
        # Each earlier engine has stored the states of all salts.
        assert found == [salt != ""] * 3
        engine.close()
    store = stored(llama, tmp_path)
    assert len(list(store.directory.iterdir())) == 3 and store.of("c").lookup(session, TOKENS) == 0


def test_a_reader_never_finds_an_incomplete_file(tmp_path):
    """A thread writes a state again and again while it is read."""
    rows, tokens, over = [np.arange(300_000, dtype=np.float32)], np.arange(9, dtype=np.int32), threading.Event()
    write_state(tmp_path / "a.state", "b", tokens, rows)

    def write() -> None:
        while not over.is_set():
            write_state(tmp_path / "a.state", "b", tokens, rows)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(40):
            state = read_head(tmp_path / "a.state")
            (found,) = read_rows(state, rows)
            assert np.array_equal(found, rows[0]) and np.array_equal(state.tokens, tokens)
    finally:
        over.set()
        writer.join()


def test_reports_an_unwritable_folder_and_continues(llama, tmp_path, capsys):
    store, session = stored(llama, tmp_path), Session(llama, 1)
    store.folder.write_text("in the way")
    for prompt in (TOKENS, OTHERS):
        session.rewind(0)
        assert read(session, store, prompt) == 0
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_saved_chat_continues_with_its_state(llama, tmp_path, capsys):
    text, location = load_tokenizer(llama), tmp_path / "chat.json"

    def chat() -> Chat:
        return Chat(Engine(llama, 1, single=True), text, system="s" * 20, max_tokens=9)

    def session_of(chat: Chat) -> Session:
        return chat.engine.scheduler.batch.slots[0]

    def asked(chat: Chat, words: str) -> tuple[str, bytes]:
        return "".join(chat.answer(words)), session_of(chat).logits().tobytes()

    stays = chat()
    asked(stays, "Hello")
    stays.save(location)
    again, damaged = chat(), chat()
    again.load(location)
    assert again.engine.position == stays.engine.position
    expected = asked(stays, "And now?")
    assert asked(again, "And now?") == expected and again.stream.request.cached == stays.stream.request.cached > 0
    state = location.with_name(location.name + STATE)
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    damaged.load(location)
    assert "castiron computes the conversation again" in capsys.readouterr().err and damaged.engine.position == 0
    assert asked(damaged, "And now?")[0] == expected[0]
    chat().save(location)
    assert not state.exists(), "a conversation without a state removes an older one"


def test_a_run_continues_from_the_system_message_of_an_earlier_run(llama, tmp_path, capsys, monkeypatch):
    def slowly(*arguments):
        time.sleep(1.0)
        return write_state(*arguments)

    def run(question: str, *more: str) -> dict:
        ask = ["run", str(llama.path), question, "--system", LETTERS, "-n", "5", "--threads", "1", "--json"]
        assert cli.main([*ask, *more]) == 0
        return json.loads(capsys.readouterr().out)

    cache = ("--prefix-cache", str(tmp_path / "states"))
    # Each run waits for its state to be written, however slow the disk is.
    monkeypatch.setattr(prefix_store, "write_state", slowly)
    assert run("Hello", *cache)["cached_tokens"] == 0
    plain, quick = run("Why?"), run("Why?", *cache)
    assert plain["cached_tokens"] == 0 and 64 <= quick["cached_tokens"] <= len(LETTERS) + 5
    assert all(plain[name] == quick[name] for name in ("tokens", "text", "prompt_tokens", "finish_reason"))
    assert cli.main(["run", str(llama.path), "Why?", *cache, "--prefix-cache-size", "0"]) == 1
    assert "--prefix-cache-size is 0" in capsys.readouterr().err
