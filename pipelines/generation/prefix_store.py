"""States of long beginnings in a directory, for the next process: what a system message or a document costs to read is paid
once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.positions import shared
from castiron.pipelines.progress import say
from castiron.pipelines.sizes import megabytes
from castiron.vmfb.aside import sweep
from castiron.vmfb.disk import reason
from castiron.vmfb.manifest import Manifest
from castiron.vmfb.state_file import StateError, StateFile, file_bytes, identity, read_head, read_rows, write_state

if TYPE_CHECKING:
    from castiron.vmfb.session import Session

# Bytes of all states in a directory, where nobody says.
MOST = 4_000_000_000
# A beginning is long from so many whole chunks on.
CHUNKS = 2
SUFFIX = ".state"
# States that are read ahead.
FETCHED = 4
# A folder may change once more within so many nanoseconds and still show the time of the change before.
GRAIN = 2_000_000_000


class PrefixStore:
    """The states in `directory` of one bundle's beginnings, which it may share with other bundles and other processes.

        store = PrefixStore(directory, bundle.manifest)
        known = store.take(session, prompt)
        session.prefill(prompt[known:], progress=lambda *_: store.offer(session, prompt))

    A state is kept where a session stands after whole chunks of its widest prefill function, because a run that goes on from
    there makes the same calls as one that begins anew: its logits are the same to the last bit. It is kept if it is `CHUNKS`
    chunks or longer and if at least half of it is in no state yet; where the states are not only rows of positions, so that
    no part of a beginning can be taken, also where two prompts part. Beyond `most` bytes the states go that were unused
    longest. One that cannot be used or written is said on stderr, and fails nothing.
    """

    def __init__(self, directory: Path | str, manifest: Manifest, most: int = MOST):
        """PipelineError if there is no directory and none can be made."""
        self.directory, self.bundle, self.most = Path(directory), identity(manifest), most
        self.folder = self.directory / self.bundle
        self.width = max(manifest.prefill_widths, default=1)
        try:
            # What was asked is in there: for no one else to read.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PipelineError(f"--prefix-cache {directory} cannot be made: {reason(error)}") from None
        self._known: dict[str, StateFile] = {}
        self._refused: set[str] = set()
        # The time of the folder when it was listed, where a later change would show.
        self._listed: int | None = None
        self._writer = ThreadPoolExecutor(1, "states")
        self._writing: Future | None = None
        self._fetched: dict[str, Future[list[np.ndarray]]] = {}
        self._writable = True

    def place(self, session: Session, prompt: np.ndarray) -> int:
        """How many tokens of `prompt` i32 [n] `take` would find."""
        return self._longest(session, prompt)[0]

    def take(self, session: Session, prompt: np.ndarray) -> int:
        """Puts `session` behind as many tokens of `prompt` as a state has, and returns their number; with 0 it stays where it
        was."""
        while True:
            place, state = self._longest(session, prompt)
            if state is None:
                return 0
            try:
                fetched = self._fetched.pop(state.path.name, None)
                rows = fetched.result() if fetched else read_rows(state, session.rows(len(state.tokens)))
            except (StateError, OSError) as error:
                self._refuse(state.path, error)
                continue
            session.take(rows, place, place)
            with contextlib.suppress(OSError):
                os.utime(state.path)
            return place

    def fetching(self, session: Session, prompt: np.ndarray) -> bool:
        """Whether what `take` would give is still being read by another thread, which begins to with the first call."""
        _, state = self._longest(session, prompt)
        if state is None:
            return False
        if (name := state.path.name) not in self._fetched:
            while len(self._fetched) >= FETCHED:
                # Of whoever asked for it and left.
                self._fetched.pop(next(iter(self._fetched)))
            self._fetched[name] = self._writer.submit(read_rows, state, session.rows(len(state.tokens)))
        return not self._fetched[name].done()

    def offer(self, session: Session, prompt: np.ndarray) -> None:
        """Keeps the state of `session`, which is reading `prompt`, if this is a place for it; returns before it is written.
        To be called after each chunk."""
        place = session.position
        if not place or place != session.whole or not session.settled or not self._writable:
            return
        if self._writing and not self._writing.done():
            # Rather one less than memory for a queue of them.
            return
        if place in self._places(session, prompt):
            self.keep(session, prompt[:place])

    def prepare(self, session: Session, tokens: np.ndarray, progress: Callable[[int, int], None] | None = None) -> int:
        """Reads `tokens` i32 [n], which prompts will begin with, by a session at its beginning, and keeps the state; returns of
        how many tokens. PipelineError if they are no whole chunk, or if the state cannot be written."""
        place = self._whole(len(tokens))
        if not place:
            raise PipelineError(
                f"the text has {len(tokens)} tokens, and a state is kept of {self.width} or more: so few are read at once"
            )
        known = self.take(session, np.append(tokens[:place], 0))
        if known < place:
            session.prefill(tokens[known:place], progress=progress)
            if not self.keep(session, tokens[:place]).result():
                raise PipelineError(f"the state of {place} tokens is not kept in {self.directory}")
        return place

    def keep(self, session: Session, tokens: np.ndarray) -> Future:
        """Keeps the state of `session`, which stands behind these tokens; of what comes out the file's size, 0 if it could not
        be written."""
        rows = [rows.copy() for rows in session.rows(len(tokens))]
        self._writing = self._writer.submit(self._write, np.array(tokens, np.int32), rows)
        return self._writing

    def finish(self) -> None:
        """Waits until everything is written."""
        if self._writing:
            self._writing.result()

    def _places(self, session: Session, prompt: np.ndarray) -> set[int]:
        """Where in `prompt` a state is worth its bytes."""
        found, _ = self._longest(session, prompt)
        last = self._whole(len(prompt) - 1)
        wanted = {last} if last >= 2 * found else set()
        common = max((self._common(state, prompt) for state in self._states()), default=0)
        if not session.begins(last, common):
            wanted.add(common)
        return {place for place in wanted if place >= CHUNKS * self.width and place > found}

    def _longest(self, session: Session, prompt: np.ndarray) -> tuple[int, StateFile | None]:
        """How many tokens of `prompt` a state can give, and that state; (0, None) without one."""
        found: tuple[int, StateFile | None] = 0, None
        for state in self._states():
            place = self._common(state, prompt)
            if place > found[0] and (place == len(state.tokens) or session.begins(len(state.tokens), place)):
                found = place, state
        return found

    def _common(self, state: StateFile, prompt: np.ndarray) -> int:
        """Tokens at the beginning of `prompt` that are those of a state, in whole chunks."""
        return self._whole(shared(state.tokens, prompt))

    def _whole(self, tokens: int) -> int:
        return tokens // self.width * self.width

    def _states(self) -> Sequence[StateFile]:
        """Those of this bundle that are there now: other processes write and remove some."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except OSError:
            changed = 0
        if changed != self._listed:
            self._listed = changed if time.time_ns() - changed > GRAIN else None
            self._list()
        return list(self._known.values())

    def _list(self) -> None:
        """Notes which states are in the folder."""
        names = set()
        with contextlib.suppress(OSError):
            names = {e.name for e in os.scandir(self.folder) if e.name.endswith(SUFFIX) and not e.name.startswith(".")}
        for name in self._known.keys() - names:
            del self._known[name]
        for name in names - self._known.keys() - self._refused:
            path = self.folder / name
            try:
                state = read_head(path)
                if state.bundle != self.bundle:
                    raise StateError(f"{path} is a state of another bundle")
                self._known[name] = state
            except (StateError, OSError) as error:
                self._refuse(path, error)

    def _refuse(self, path: Path, error: StateError | OSError) -> None:
        """Of what cannot be used: said once, and made room of the name for one that can."""
        self._known.pop(path.name, None)
        # Another process may have needed the room.
        if not isinstance(error, FileNotFoundError):
            self._refused.add(path.name)
            say(f"{error}; it is not used, and its tokens are read again")

    def _write(self, tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int:
        if (size := file_bytes(tokens, rows)) > self.most:
            say(f"a state of {len(tokens)} tokens takes {megabytes(size)}, more than --prefix-cache-size: it is not kept")
            return 0
        name = hashlib.sha256(tokens.tobytes()).hexdigest()[:32] + SUFFIX
        try:
            written = write_state(self.folder / name, self.bundle, tokens, rows)
            self._refused.discard(name)
            self._make_room()
            return written
        except OSError as error:
            self._writable = False
            say(f"{self.directory} cannot be written ({reason(error)}), so no more states are kept there")
            return 0

    def _make_room(self) -> None:
        """Removes what was unused longest until the rest is no more than `most` bytes, and what killed processes left."""
        found = []
        for folder in self.directory.glob("*/"):
            sweep(folder)
        for path in self.directory.glob(f"*/[!.]*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.most:
                break
            path.unlink(missing_ok=True)
            total -= size
