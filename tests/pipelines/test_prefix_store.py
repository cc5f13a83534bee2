"""States of long beginnings on disk: a run that goes on from one is the run without, to the last bit; what is not the state
that was written is never used."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from castiron.pipelines import cli
from castiron.pipelines.generation import prefix_store
from castiron.pipelines.generation.chat import STATE, Chat
from castiron.pipelines.generation.prefix_store import CHUNKS, PrefixStore
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Sequence
from castiron.pipelines.generation.text import load_text
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.manifest import MODEL, WEIGHTS
from castiron.vmfb.session import Session
from castiron.vmfb.state_file import identity, read_head, read_rows, write_state
from tests.families.checkpoints import VOCAB, bundle
from tests.pipelines import served

TOKENS = np.random.default_rng(23).integers(3, VOCAB, 110)
OTHERS = np.random.default_rng(24).integers(3, VOCAB, 110)
# As TOKENS to the middle.
PARTS = np.concatenate([TOKENS[:77], OTHERS[77:]])
LETTERS = "".join(served.LETTERS[i % 90 + 1] for i in range(100))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Bundle:
    return open_bundle(served.bundle(tmp_path_factory.getbasetemp()))


@pytest.fixture(scope="module", params=["llama", "lfm2", "ring"])
def cast(request, llama, tmp_path_factory) -> Bundle:
    """Rows of positions; of those and recurrent ones; rings."""
    return llama if request.param == "llama" else bundle(request.param, "kernels", tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def program(cast):
    return Session(cast, 1).program


def recurrent(cast: Bundle) -> bool:
    return any(state.kind == "recurrent" for state in cast.manifest.states)


def stored(cast: Bundle, folder: Path, **options) -> PrefixStore:
    """As another process has it, which knows nothing but the folder."""
    return PrefixStore(folder / "states", cast.manifest, **options)


def read(session: Session, store: PrefixStore | None, prompt: np.ndarray) -> int:
    """Reads a prompt as castiron run does; how many of its tokens the store had."""
    known = store.take(session, prompt) if store else 0
    session.prefill(prompt[known:], progress=lambda *_: store and store.offer(session, prompt))
    if store:
        store.finish()
    return known


def says(session: Session, store: PrefixStore | None, prompt: np.ndarray) -> tuple[int, list[bytes]]:
    """How many tokens were known, and the logits after the prompt and after five greedy tokens, to the bit."""
    known, found = read(session, store, prompt), []
    for _ in range(6):
        logits = session.logits()
        found.append(logits.tobytes())
        session.step(int(logits.argmax()))
    return known, found


def test_a_run_from_a_state_is_the_run_without_it_to_the_last_bit(cast, program, tmp_path):
    store = stored(cast, tmp_path)
    last = (len(TOKENS) - 1) // store.width * store.width
    assert last >= CHUNKS * store.width
    _, expected = says(Session(program), None, TOKENS)
    assert says(Session(program), store, TOKENS) == (0, expected)
    again = stored(cast, tmp_path)
    assert says(Session(program), again, TOKENS) == (last, expected)
    used = Session(program)
    used.prefill(OTHERS[:50])
    assert says(used, again, TOKENS) == (last, expected)
    assert len(list(store.folder.iterdir())) == 1, "what is there is not written again"


def test_prompts_that_part_share_their_beginning(cast, program, tmp_path):
    """Rows of positions are taken as far as they go, and rings as far back as they reach; of recurrent states one is kept where
    two prompts part."""
    common = 77 // stored(cast, tmp_path).width * stored(cast, tmp_path).width
    _, expected = says(Session(program), None, PARTS)
    read(Session(program), stored(cast, tmp_path), TOKENS)
    assert says(Session(program), stored(cast, tmp_path), PARTS) == (0 if recurrent(cast) else common, expected)
    third = np.concatenate([TOKENS[:77], OTHERS[:20]])
    known, found = says(Session(program), stored(cast, tmp_path), third)
    assert (known, found) == (common, says(Session(program), None, third)[1])


def test_what_a_ring_lost_to_later_tokens_is_not_kept(cast, program, tmp_path):
    """A session that has been further on holds rows of what it took back, in the place of the first that its window sees."""
    session, store = Session(program), stored(cast, tmp_path)
    place = (len(TOKENS) - 1) // store.width * store.width
    session.prefill(TOKENS[:place])
    assert session.settled and session.whole == place
    snapshot = session.snapshot()
    session.prefill(OTHERS[:3])
    session.restore(snapshot)
    store.offer(session, TOKENS)
    store.finish()
    rings = any(state.kind == "window" for state in cast.manifest.states)
    assert session.settled != rings and len(list(store.directory.glob("*/*"))) == (not rings)


def test_a_scheduler_finds_what_another_has_read(cast, tmp_path):
    found = []
    for _ in range(2):
        scheduler = Scheduler(cast, 1, store=stored(cast, tmp_path))
        sequence = Sequence(TOKENS, scheduler.context, max_tokens=8, stop_tokens=())
        scheduler.submit(sequence)
        while not scheduler.idle:
            scheduler.turn()
        scheduler.cache.store.finish()
        found.append((sequence.cached, sequence.tokens))
    assert found[0][0] == 0 < found[1][0] and found[0][1] == found[1][1]


def test_a_folder_is_listed_when_it_has_changed(llama, tmp_path, monkeypatch):
    """And not whenever a prompt waits: what another process adds or removes shows in the folder's time."""
    store, session = stored(llama, tmp_path), Session(llama, 1)
    store.prepare(session, TOKENS[: store.width * CHUNKS])
    store.finish()
    listed, scan = [], os.scandir
    monkeypatch.setattr(prefix_store.os, "scandir", lambda place: listed.append(place) or scan(place))
    # A clock that stands still as long after the folder's change as hides a second one.
    now = store.folder.stat().st_mtime_ns + prefix_store.GRAIN
    monkeypatch.setattr(prefix_store, "time", SimpleNamespace(time_ns=lambda: now))

    def looked(times: int = 20) -> int:
        """How often the folder was listed for so many looks at it."""
        listed.clear()
        for _ in range(times):
            store.place(session, OTHERS), store.fetching(session, OTHERS)
        return listed.count(store.folder)

    assert looked() == 40, "a second change within the clock's grain would not show"
    os.utime(store.folder, (1, 1))
    assert looked() == 1 and looked() == 0
    other = stored(llama, tmp_path)
    other.prepare(Session(llama, 1), OTHERS[: store.width * CHUNKS])
    other.finish()
    assert store.place(session, OTHERS) == store.width * CHUNKS
    os.utime(store.folder, (2, 2))
    assert looked() == 1
    for path in store.folder.iterdir():
        path.unlink()
    assert store.place(session, OTHERS) == 0


def test_a_running_answer_does_not_wait_for_the_disk(llama, tmp_path, monkeypatch):
    """The state is read, and its sha256 taken, while the others go on; the sequence has it then."""
    store = stored(llama, tmp_path)
    store.prepare(Session(llama, 1), TOKENS[: store.width * CHUNKS])
    threads, let = [], threading.Event()

    def slowly(*arguments):
        threads.append(threading.current_thread())
        assert let.wait(60)
        return read_rows(*arguments)

    monkeypatch.setattr(prefix_store, "read_rows", slowly)
    scheduler = Scheduler(llama, 1, store=store)
    running, comes = (Sequence(p, scheduler.context, max_tokens=9, stop_tokens=()) for p in (OTHERS[:5], TOKENS))
    scheduler.submit(running)
    scheduler.turn()
    scheduler.submit(comes)
    for _ in range(3):
        scheduler.turn()
    assert len(running.tokens) == 5 and not comes.began and threading.current_thread() not in threads
    let.set()
    while not scheduler.idle:
        scheduler.turn()
    assert comes.cached == store.width * CHUNKS and len(threads) == 1


def test_only_states_of_whole_chunks_are_kept(llama, tmp_path):
    """Anything else would have other bits than a run that begins anew."""
    session, store = Session(llama, 1), stored(llama, tmp_path)
    session.prefill(TOKENS[:5])
    session.prefill(TOKENS[5:64])
    assert session.position == 64 and session.whole == 0
    store.offer(session, TOKENS)
    session.rewind(0)
    session.prefill(TOKENS[:96])
    whole = 96 // session.widest * session.widest
    assert session.whole == whole
    session.rewind(whole - 1)
    assert session.whole == whole - session.widest
    assert not store.folder.exists()


def test_what_is_not_the_state_that_was_written_is_said_and_read_again(llama, tmp_path, capsys):
    program = Session(llama, 1).program
    _, expected = says(Session(program), stored(llama, tmp_path), TOKENS)
    (path,) = stored(llama, tmp_path).folder.iterdir()
    whole = path.read_bytes()
    for place in (0, 30, 90, 100, 300, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert says(Session(program), stored(llama, tmp_path), TOKENS) == (0, expected), place
        # A token that is another one is that of another prompt, until that one comes.
        assert place == 300 or "it is not used" in capsys.readouterr().err, place
        path.unlink(missing_ok=True)
    for wrong in (whole[:-64], whole + bytes(64), whole[:200], b""):
        path.write_bytes(wrong)
        assert says(Session(program), stored(llama, tmp_path), TOKENS) == (0, expected)
        assert "it is not used" in capsys.readouterr().err
        assert path.read_bytes() == whole, "the state is made anew"


def test_a_state_of_another_bundle_is_refused(cast, llama, tmp_path, capsys):
    if cast is llama:
        cast = bundle("ring", "kernels", tmp_path)
    mine, others = stored(llama, tmp_path), stored(cast, tmp_path)
    read(Session(llama, 1), mine, TOKENS)
    (path,) = mine.folder.iterdir()
    others.folder.mkdir()
    os.rename(path, others.folder / path.name)
    assert read(Session(cast, 1), stored(cast, tmp_path), TOKENS) == 0
    assert "is a state of another bundle; it is not used" in capsys.readouterr().err


def test_another_program_and_other_weights_are_another_bundle(llama):
    files = llama.manifest.files
    others = [
        replace(llama.manifest, files={**files, name: replace(files[name], sha256="0" * 64)}) for name in (MODEL, WEIGHTS)
    ]
    assert len({identity(manifest) for manifest in (llama.manifest, *others)}) == 3


def test_the_least_used_goes(llama, tmp_path):
    program, prompts = Session(llama, 1).program, [np.roll(TOKENS, n) for n in range(4)]
    read(Session(program), stored(llama, tmp_path), prompts[0])
    (path,) = stored(llama, tmp_path).folder.iterdir()
    size = path.stat().st_size
    most = int(2.5 * size)
    for day, prompt in enumerate(prompts[:2]):
        read(Session(program), stored(llama, tmp_path, most=most), prompt)
        for state in path.parent.iterdir():
            os.utime(state, (day, day + (state == path)))
    # A killed process' leavings, and what is another's.
    (path.parent / ".x.state.castiron-0123abcd").write_bytes(bytes(size))
    (tmp_path / "states" / "mine").write_text("mine")
    read(Session(program), stored(llama, tmp_path, most=most), prompts[2])
    assert len(list(path.parent.iterdir())) == 2 and path.exists() and (tmp_path / "states" / "mine").exists()
    known = [stored(llama, tmp_path).place(Session(program), prompt) > 0 for prompt in prompts]
    assert known == [True, False, True, False]
    assert (
        read(Session(program), stored(llama, tmp_path, most=size - 1), prompts[3]) == 0
        and len(list(path.parent.iterdir())) == 2
    )


def test_a_reader_never_meets_half_a_file(tmp_path):
    """One process writes a state again and again while another reads it."""
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


def test_a_folder_that_cannot_be_written_is_said_once_and_fails_nothing(llama, tmp_path, capsys):
    store, session = stored(llama, tmp_path), Session(llama, 1)
    store.folder.write_text("in the way")
    for prompt in (TOKENS, OTHERS):
        session.rewind(0)
        assert read(session, store, prompt) == 0
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_a_saved_chat_goes_on_as_if_it_had_not_been_left(llama, tmp_path, capsys):
    text, place = load_text(llama), tmp_path / "chat.json"

    def chat() -> Chat:
        return Chat(Session(llama, 1), text, system="s" * 20, max_tokens=9)

    def asked(chat: Chat, words: str) -> tuple[str, bytes]:
        return "".join(chat.answer(words)), chat.session.logits().tobytes()

    stays = chat()
    asked(stays, "Hello")
    stays.save(place)
    again, damaged = chat(), chat()
    again.load(place)
    assert again.session.position == stays.session.position
    expected = asked(stays, "And now?")
    assert asked(again, "And now?") == expected and again.generation.prompt_tokens == stays.generation.prompt_tokens
    state = place.with_name(place.name + STATE)
    data = bytearray(state.read_bytes())
    data[-1] ^= 1
    state.write_bytes(data)
    damaged.load(place)
    assert "the conversation is read again" in capsys.readouterr().err and damaged.session.position == 0
    assert asked(damaged, "And now?")[0] == expected[0]
    chat().save(place)
    assert not state.exists(), "a conversation without a state leaves no other's"


def test_the_state_of_a_system_message_is_made_ahead_of_time(llama, tmp_path, capsys):
    file, states = tmp_path / "system.txt", str(tmp_path / "states")
    file.write_text(LETTERS + "\n")
    add = ["cache", "add", str(llama.path), str(file), "--prefix-cache", states, "--threads", "1", "--json"]
    ask = ["run", str(llama.path), "Why?", "--system", LETTERS, "-n", "5", "--threads", "1", "--json"]

    def facts(*argv: str) -> dict:
        assert cli.main(list(argv)) == 0
        return json.loads(capsys.readouterr().out)

    made = facts(*add)
    # TEMPLATE puts "s:" before it and ";u:" after.
    assert made["tokens"] == len(LETTERS) + 5 and 64 <= made["kept"] <= made["tokens"]
    assert facts(*add) == made
    plain, quick = facts(*ask), facts(*ask, "--prefix-cache", states)
    assert plain["cached_tokens"] == 0 and quick["cached_tokens"] == made["kept"]
    assert all(plain[name] == quick[name] for name in ("tokens", "text", "prompt_tokens", "finish_reason"))
    raw = tmp_path / "raw"
    assert facts(*add[:-1], "--raw", "--prefix-cache", str(raw), "--json")["tokens"] == len(LETTERS)
    file.write_text("short")
    assert cli.main(add[:-1]) == 1 and "tokens, and a state is kept of" in capsys.readouterr().err
    assert cli.main([*add[:-1], "--prefix-cache-size", "0"]) == 1 and "--prefix-cache-size is 0" in capsys.readouterr().err
    for wrong in (add[:4], [*add[:3], "--prefix-cache", states]):
        with pytest.raises(SystemExit):
            cli.main(wrong)
        assert "castiron cache add BUNDLE FILE --prefix-cache DIR" in capsys.readouterr().err
