"""A store on disk for the states of long prefixes, so that the processes of a machine read a system
message or document only once."""

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

from castiron.pipelines.engine.context import common_prefix
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import megabytes, print_message
from castiron.vmfb.disk import reason
from castiron.vmfb.manifest import Manifest
from castiron.vmfb.staging import remove_abandoned
from castiron.vmfb.state_file import StateError, StateFile, file_bytes, identity, read_head, read_rows, write_state

if TYPE_CHECKING:
    from castiron.vmfb.session import Session

# Default limit of the bytes of all states in a directory.
MAX_BYTES = 4_000_000_000
# The store ignores a prefix of fewer complete chunks.
MIN_CHUNKS = 2
SUFFIX = ".state"
# How many states are read from disk before the request that needs them gets a slot.
MAX_FETCHED = 4
# Two changes of a folder within this many nanoseconds may have the same modification time.
CLOCK_GRAIN = 2_000_000_000


class PrefixStore:
    """A store of the prefix states of one bundle in `directory`, which other bundles and processes
    may share.

        store = PrefixStore(directory, bundle.manifest)
        known = store.take(session, prompt)
        session.prefill(prompt[known:], progress=lambda *_: store.offer(session, prompt))

    A state ends after a complete chunk of the widest prefill function. A run that continues from it
    makes the same calls as a run from the start, so its logits are equal to the last bit. A new
    state has at least `MIN_CHUNKS` chunks, at least half of them in no other state. If the first
    part of a state cannot be used by itself (as in a recurrent model), the store also writes a
    state where two prompts diverge. Beyond `max_bytes` in `directory` it removes the least recently
    used states. It reports a state that cannot be read or written on stderr and continues.
    """

    def __init__(self, directory: Path | str, manifest: Manifest, max_bytes: int = MAX_BYTES):
        """Create the directory if it does not exist; raise PipelineError if that fails."""
        self.directory, self.bundle, self.max_bytes = Path(directory), identity(manifest), max_bytes
        self.folder = self.directory / self.bundle
        self.width = max(manifest.widths("prefill"), default=1)
        try:
            # Prompts can be read from states: only the owner may read them.
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise PipelineError(f"cannot create --prefix-cache {directory}: {reason(error)}") from None
        self._known: dict[str, StateFile] = {}
        self._rejected: set[str] = set()
        # The folder's modification time when it was listed; None if a later change might not show.
        self._listed: int | None = None
        self._writer = ThreadPoolExecutor(1, "states")
        self._writing: Future | None = None
        self._fetched: dict[str, Future[list[np.ndarray]]] = {}
        self._writable = True

    def lookup(self, session: Session, prompt: np.ndarray) -> int:
        """Return how many tokens of `prompt`, i32 [n], the method `take` would find."""
        return self._longest(session, prompt)[0]

    def take(self, session: Session, prompt: np.ndarray) -> int:
        """Load the state with the longest prefix of `prompt` into a session.

        Returns how many tokens the prefix has. If that is 0, the session is unchanged.
        """
        while True:
            position, state = self._longest(session, prompt)
            if state is None:
                return 0
            try:
                fetched = self._fetched.pop(state.path.name, None)
                rows = fetched.result() if fetched else read_rows(state, session.rows(len(state.tokens)))
            except (StateError, OSError) as error:
                self._reject(state.path, error)
                continue
            session.take(rows, position, position)
            with contextlib.suppress(OSError):
                os.utime(state.path)
            return position

    def fetching(self, session: Session, prompt: np.ndarray) -> bool:
        """Return whether a thread is still reading the state that `take` would use.

        The first call for a state starts to read it on the thread.
        """
        _, state = self._longest(session, prompt)
        if state is None:
            return False
        if (name := state.path.name) not in self._fetched:
            while len(self._fetched) >= MAX_FETCHED:
                # The oldest state was read for a request that was cancelled.
                self._fetched.pop(next(iter(self._fetched)))
            self._fetched[name] = self._writer.submit(read_rows, state, session.rows(len(state.tokens)))
        return not self._fetched[name].done()

    def offer(self, session: Session, prompt: np.ndarray) -> None:
        """Store the state of `session` if `_positions` includes the current position.

        The caller calls this after each chunk of `prompt` that the session reads. Another thread
        writes the state after this method has returned.
        """
        position = session.position
        if not position or position != session.chunked_tokens or not session.settled or not self._writable:
            return
        if self._writing and not self._writing.done():
            # Skip this state rather than queue copies in memory.
            return
        if position in self._positions(session, prompt):
            self.save(session, prompt[:position])

    def prepare(self, session: Session, tokens: np.ndarray, progress: Callable[[int, int], None] | None = None) -> int:
        """Let `session`, which is at position 0, read `tokens`, i32 [n], and store the state.

        Only complete chunks are read; returns the number of tokens in them. Raises PipelineError if
        `tokens` fill no chunk or the state cannot be written.
        """
        position = self._complete(len(tokens))
        if not position:
            raise PipelineError(f"the text has {len(tokens)} tokens, fewer than a chunk of {self.width}; give a longer text")
        known = self.take(session, np.append(tokens[:position], 0))
        if known < position:
            session.prefill(tokens[known:position], progress=progress)
            if not self.save(session, tokens[:position]).result():
                raise PipelineError(f"the state of {position} tokens was not written to {self.directory}")
        return position

    def save(self, session: Session, tokens: np.ndarray) -> Future:
        """Store the state of `session`, which has read `tokens`.

        The result of the future is the size of the file in bytes, 0 if it was not written.
        """
        rows = [rows.copy() for rows in session.rows(len(tokens))]
        self._writing = self._writer.submit(self._write, np.array(tokens, np.int32), rows)
        return self._writing

    def finish(self) -> None:
        """Wait until the last state that was passed to `save` is written."""
        if self._writing:
            self._writing.result()

    def _positions(self, session: Session, prompt: np.ndarray) -> set[int]:
        """Return the positions of `prompt` after which its state should be stored."""
        found, _ = self._longest(session, prompt)
        last = self._complete(len(prompt) - 1)
        wanted = {last} if last >= 2 * found else set()
        common = max((self._common(state, prompt) for state in self._states()), default=0)
        if not session.begins(last, common):
            wanted.add(common)
        return {position for position in wanted if position >= MIN_CHUNKS * self.width and position > found}

    def _longest(self, session: Session, prompt: np.ndarray) -> tuple[int, StateFile | None]:
        """Return length and state of the longest stored prefix of `prompt`, or (0, None)."""
        found: tuple[int, StateFile | None] = 0, None
        for state in self._states():
            position = self._common(state, prompt)
            if position > found[0] and (position == len(state.tokens) or session.begins(len(state.tokens), position)):
                found = position, state
        return found

    def _common(self, state: StateFile, prompt: np.ndarray) -> int:
        """Return the length of the common prefix of a state and `prompt`, in complete chunks."""
        return self._complete(common_prefix(state.tokens, prompt))

    def _complete(self, tokens: int) -> int:
        return tokens // self.width * self.width

    def _states(self) -> Sequence[StateFile]:
        """Return the stored states of this bundle; list the folder again if it has changed."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
        except OSError:
            changed = 0
        if changed != self._listed:
            self._listed = changed if time.time_ns() - changed > CLOCK_GRAIN else None
            self._list()
        return list(self._known.values())

    def _list(self) -> None:
        """List the folder and update `self._known`."""
        names = set()
        with contextlib.suppress(OSError):
            names = {e.name for e in os.scandir(self.folder) if e.name.endswith(SUFFIX) and not e.name.startswith(".")}
        for name in self._known.keys() - names:
            del self._known[name]
        for name in names - self._known.keys() - self._rejected:
            path = self.folder / name
            try:
                state = read_head(path)
                if state.bundle != self.bundle:
                    raise StateError(f"{path} is a state of another bundle")
                self._known[name] = state
            except (StateError, OSError) as error:
                self._reject(path, error)

    def _reject(self, path: Path, error: StateError | OSError) -> None:
        """Report a state that cannot be used and ignore its file until it is written again."""
        self._known.pop(path.name, None)
        # Another process may have removed the file for space.
        if not isinstance(error, FileNotFoundError):
            self._rejected.add(path.name)
            print_message(f"{error}; its tokens are read again")

    def _write(self, tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int:
        if (size := file_bytes(tokens, rows)) > self.max_bytes:
            print_message(
                f"a state of {len(tokens)} tokens takes {megabytes(size)}, more than --prefix-cache-size; it is not stored"
            )
            return 0
        name = hashlib.sha256(tokens.tobytes()).hexdigest()[:32] + SUFFIX
        try:
            written = write_state(self.folder / name, self.bundle, tokens, rows)
            self._rejected.discard(name)
            self._evict()
            return written
        except OSError as error:
            self._writable = False
            print_message(f"{self.directory} cannot be written: {reason(error)}; no more states are stored")
            return 0

    def _evict(self) -> None:
        """Remove the least recently used states, and temporary files of killed processes."""
        found = []
        for folder in self.directory.glob("*/"):
            remove_abandoned(folder)
        for path in self.directory.glob(f"*/[!.]*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                found.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size
