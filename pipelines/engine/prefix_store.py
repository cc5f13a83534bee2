"""A store on disk for the states (KV caches) of long prefixes, so that each is computed once."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.terminal import megabytes, print_message
from castiron.vmfb.atomic_write import PRIVATE_FOLDER, remove_abandoned
from castiron.vmfb.bundle.manifest import Manifest
from castiron.vmfb.cache_folder import claim
from castiron.vmfb.file_errors import reason
from castiron.vmfb.run.session import Session
from castiron.vmfb.run.state_file import StateError, StateFile, file_bytes, identity, read_head, read_rows, write_state

# Default of the max bytes of all states in a directory.
MAX_BYTES = 4_000_000_000
# Min complete chunks of a prefix that is stored. A chunk is one call of the widest prefill function.
MIN_CHUNKS = 2
# Min tokens of a prefix that a server stores without being asked: fewer are computed in seconds.
LONG_PREFIX = 2048
SUFFIX = ".state"
# Names of the folders and, before the suffix, of the files in a store's directory, which may have other files too.
_NAME = re.compile(r"[0-9a-f]{32}")
# Max states that are read from disk into memory for requests that wait for a slot.
MAX_FETCHED = 4
# Seconds between listings of the directory, which find states that other processes added.
LISTED_SECONDS = 1.0


class PrefixStore:
    """A store on disk for the states of a bundle's long prefixes; processes may share it.

        store = PrefixStore(directory, bundle.manifest)
        known = store.take(session, prompt)  # loads the longest stored prefix
        # After each chunk, `offer` stores the state if it is likely to be needed again.
        session.prefill(prompt[known:], progress=lambda *_: store.offer(session, prompt))

    A stored state ends after a full chunk, so a session that continues from it reads the same
    chunks as without the store, and computes the same logits to the last bit. It has at least
    `MIN_CHUNKS` chunks and `min_tokens` tokens, and is at least twice as long as the longest stored
    prefix of its text, unless it is the common prefix of a prompt and a stored text of a recurrent
    model, whose states cannot be cut. Above `max_bytes` in all, the least recently used are
    removed. Failures to read or write a state are printed on stderr.
    """

    def __init__(
        self, directory: Path | str, manifest: Manifest, max_bytes: int = MAX_BYTES, min_tokens: int = 0, salt: str = "",
        is_long: bool = False,
    ):  # fmt: skip
        """Open the store in `directory`, with the states of prompts with `salt`.

        is_long: whether the states are those of sequences longer than the original context.
        """
        self.directory, self.manifest, self.max_bytes, self.is_long = Path(directory), manifest, max_bytes, is_long
        self.bundle = identity(manifest, salt, is_long)
        self.folder = self.directory / self.bundle
        self.width = max(manifest.widths("prefill"), default=1)
        self.min_tokens = max(min_tokens, MIN_CHUNKS * self.width)
        try:
            # Prompts can be read from states: only the owner may read them.
            self.directory.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        except OSError as error:
            raise PipelineError(f"cannot create the directory {directory} of --prefix-cache: {reason(error)}") from None
        self._known: dict[str, StateFile] = {}
        self._rejected: set[str] = set()
        # When to list the folder again, in `time.monotonic` seconds.
        self._next_listing = 0.0
        self._writer = ThreadPoolExecutor(1, "states")
        self._writing: Future | None = None
        self._fetched: dict[str, Future[list[np.ndarray]]] = {}
        self._writable = True
        self._others: dict[tuple[str, bool], PrefixStore] = {(salt, is_long): self}

    def of(self, salt: str, is_long: bool = False) -> PrefixStore:
        """Return the store of the states with this salt and `is_long`, in the same directory."""
        if (key := (salt, is_long)) not in self._others:
            self._others[key] = PrefixStore(self.directory, self.manifest, self.max_bytes, self.min_tokens, *key)
        return self._others[key]

    def lookup(self, session: Session, prompt: np.ndarray) -> int:
        """Return the length of the longest stored prefix of `prompt`, i32 [n], or 0."""
        return self._longest(session, prompt)[0]

    def take(self, session: Session, prompt: np.ndarray) -> int:
        """Load the longest stored prefix of `prompt` into `session`; return its length, or 0."""
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
            session.take(rows, prompt[:position], position, self.is_long)
            with contextlib.suppress(OSError):
                os.utime(state.path)
            return position

    def fetching(self, session: Session, prompt: np.ndarray) -> bool:
        """As `PrefixCache.fetching`; `session`: any session of the bundle."""
        _, state = self._longest(session, prompt)
        if state is None:
            return False
        if (name := state.path.name) not in self._fetched:
            while len(self._fetched) >= MAX_FETCHED:
                # Drop the oldest state, which was read for a request that has been cancelled.
                self._fetched.pop(next(iter(self._fetched)))
            self._fetched[name] = self._writer.submit(read_rows, state, session.rows(len(state.tokens)))
        return not self._fetched[name].done()

    def offer(self, session: Session, prompt: np.ndarray) -> None:
        """Store the states of `session`, which reads `prompt`, if they are likely to be needed."""
        position = session.position
        if not position or position != session.chunked_tokens or not session.settled or not self._writable:
            return
        if self._writing and not self._writing.done():
            # Skip this state rather than queue copies in memory.
            return
        if position in self._positions(session, prompt):
            self.save(session, prompt[:position])

    def will_store(self, session: Session, prompt: np.ndarray, start: int) -> bool:
        """Return whether `offer` will store states while a session reads on from `start`."""
        return self._writable and any(position > start for position in self._positions(session, prompt))

    def save(self, session: Session, tokens: np.ndarray) -> Future:
        """Write the states after these first tokens, i32 [n], in another thread.

        The future's result is the size of the file in bytes, or 0 if it was not written.
        """
        rows = [rows.copy() for rows in session.rows(len(tokens))]
        self._writing = self._writer.submit(self._write, np.array(tokens, np.int32), rows)
        return self._writing

    def finish(self) -> None:
        """Wait until the KV caches passed to `save` are written."""
        for store in self._others.values():
            if store._writing:
                store._writing.result()

    def _positions(self, session: Session, prompt: np.ndarray) -> set[int]:
        found, _ = self._longest(session, prompt)
        last = self._complete(len(prompt) - 1)
        wanted = {last} if last >= 2 * found else set()
        common = max((self._common(state, prompt) for state in self._states()), default=0)
        if not session.begins(last, common):
            wanted.add(common)
        return {position for position in wanted if position >= self.min_tokens and position > found}

    def _longest(self, session: Session, prompt: np.ndarray) -> tuple[int, StateFile | None]:
        """Return (length of the longest stored prefix of `prompt`, its file), or (0, None)."""
        found: tuple[int, StateFile | None] = 0, None
        for state in self._states():
            position = self._common(state, prompt)
            if position > found[0] and (position == len(state.tokens) or session.begins(len(state.tokens), position)):
                found = position, state
        return found

    def _common(self, state: StateFile, prompt: np.ndarray) -> int:
        return self._complete(common_prefix(state.tokens, prompt))

    def _complete(self, tokens: int) -> int:
        return tokens // self.width * self.width

    def _states(self) -> Sequence[StateFile]:
        if time.monotonic() >= self._next_listing:
            self._next_listing = time.monotonic() + LISTED_SECONDS
            self._list()
        return list(self._known.values())

    def _list(self) -> None:
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
                    raise StateError(f"{path} is a state of another bundle; delete the file")
                self._known[name] = state
            except (StateError, OSError) as error:
                self._reject(path, error)

    def _reject(self, path: Path, error: StateError | OSError) -> None:
        self._known.pop(path.name, None)
        # Another process may have removed the file for space.
        if not isinstance(error, FileNotFoundError):
            self._rejected.add(path.name)
            print_message(f"{error}; castiron computes these tokens again")

    def _write(self, tokens: np.ndarray, rows: Sequence[np.ndarray]) -> int:
        if (size := file_bytes(tokens, rows)) > self.max_bytes:
            print_message(f"the state after {len(tokens)} tokens is not stored: {megabytes(size)} exceed --prefix-cache-size")
            return 0
        name = hashlib.sha256(tokens.tobytes()).hexdigest()[:32] + SUFFIX
        claim(self.folder)
        try:
            # The directory may have existed before, with a mode of its owner's choice.
            self.folder.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            with contextlib.suppress(PermissionError):
                self.folder.chmod(PRIVATE_FOLDER)
            written = write_state(self.folder / name, self.bundle, tokens, rows)
            self._rejected.discard(name)
            self._next_listing = 0.0
            self._evict()
            return written
        except OSError as error:
            self._writable = False
            print_message(f"{self.directory} cannot be written: {reason(error)}; no more states are stored")
            return 0

    def _evict(self) -> None:
        found = []
        for folder in (path for path in self.directory.iterdir() if _NAME.fullmatch(path.name) and not path.is_symlink()):
            remove_abandoned(folder)
            for path in (path for path in folder.glob(f"*{SUFFIX}") if _NAME.fullmatch(path.stem)):
                with contextlib.suppress(FileNotFoundError):
                    stat = path.lstat()
                    found.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def common_prefix(cached: np.ndarray, prompt: np.ndarray) -> int:
    """Return the length of the common prefix of two token sequences, i32 [n] each.

    The last token of `prompt` does not count: the model reads it to compute the next logits.
    """
    length = max(0, min(len(cached), len(prompt) - 1))
    differs = cached[:length] != prompt[:length]
    return int(differs.argmax()) if differs.any() else length
