"""Running a bundle: one conversation's states and position, and the calls that move it on."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from castiron.vmfb.bundle import Bundle
from castiron.vmfb.chunks import chunks
from castiron.vmfb.program import Buffer, Call, Program, SessionError, alone
from castiron.vmfb.states import KINDS, Snapshot

# Positions that a session can come back to where its states do not remember them by themselves.
KEPT = 4
# Of what is kept of them, beyond which the last position alone is.
KEPT_BYTES = 2**28


class Session:
    """The states of one conversation at `position`, over a program that forks share.

    Sessions of one program run one at a time: a call while another thread is in one is a SessionError, and so is one in a
    forked child of the process that made a session of several threads. A large context costs memory only as it is filled:
    the states are pages that the system supplies when first written.
    """

    def __init__(
        self, source: Bundle | Path | str | Program, threads: int | None = None, states: Sequence[Buffer] | None = None
    ):
        """`source`: a bundle or its path, which `threads` threads run (default: the physical cores), or a program that runs
        already.

        `states`: buffers of one sequence to use, zero so far, instead of buffers of its own. SessionError for threads less
        than one, and for a bundle that encodes texts.
        """
        self.program = program = source if isinstance(source, Program) else Program(source, threads)
        self.manifest = manifest = program.manifest
        if manifest.encoder:
            raise SessionError(f"{manifest.name} encodes texts and generates none: castiron embed gives their vectors")
        self.context, self.vocab, self.threads = manifest.context, manifest.vocab, program.threads
        self._position = self._whole = 0
        # What `whole` counts.
        self.widest = max(manifest.prefill_widths, default=1)
        states = tuple(states or (program.zeros(state.shape, state.dtype) for state in manifest.states))
        self._states = [KINDS[s.kind](buffer.array, s.window) for s, buffer in zip(manifest.states, states, strict=True)]
        self._kept: deque[Snapshot] = deque(maxlen=KEPT)
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        token, place, length = (program.zeros((), "i32") for _ in range(3))
        # Written to as plain memory: a numpy scalar assignment costs twice as much.
        self._token_word, self._position_word, self._length_word = token.words, place.words, length.words
        self._decode = Call(program, manifest.function("decode"), (token, place, *states))

        def calls(role: str, *numbers: Buffer) -> dict[int, tuple[Call, Buffer]]:
            tokens = {width: program.zeros((width,), "i32") for width in manifest.widths(role)}
            return {w: (Call(program, manifest.function(role, w), (t, *numbers, *states)), t) for w, t in tokens.items()}

        self._prefill, self._verify = calls("prefill", place, length), calls("verify", place)
        self._embed = calls("embed", place, length)
        # The kernels skip rows past the length; StableHLO alone computes them.
        self._padding = 0.0 if manifest.lowering == "kernels" else 1.0
        self._last: Call | Row | np.ndarray | None = None

    @property
    def position(self) -> int:
        """How many tokens the states have taken in; the next one goes here."""
        return self._position

    @property
    def whole(self) -> int:
        """How many tokens, from the first on, came in whole chunks of the `widest` prefill function. What the states hold of
        them is the same to the last bit whatever came after, or before in other sessions: a long prompt goes by such chunks."""
        return self._whole

    @alone
    def step(self, token: int) -> int:
        """Appends one token and returns the most probable next one (the lowest id of equals)."""
        position = self._position
        if position >= self.context or not 0 <= token < self.vocab:
            self._checked((token,))
        self._token_word[0] = token
        self._position_word[0] = position
        call = self._decode
        call.invoke()
        self._position = position + 1
        self._last = call
        return call.argmax()

    def count_runtime(self) -> Callable[[], float]:
        """What returns the seconds that steps from now on spend inside the runtime: the rest of a step is Python's."""
        call = self._decode
        call.count_seconds()
        return lambda: call.seconds

    @alone
    def prefill(self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None) -> int:
        """Appends `tokens` from `position` on, in chunks, and returns the most probable token after them.

        `progress` gets (tokens done, tokens in all) after every chunk. SessionError, before any work, for no tokens,
        an id outside the vocabulary or an end past the context.
        """
        ids = self._checked(tokens)
        done, total = 0, int(ids.size)
        best = 0
        for width, count in chunks(total, self._position, self.context, self.manifest.prefill_widths, self._padding):
            whole = self._whole == self._position and width == count == self.widest
            best = self._chunk(width, ids[done : done + count])
            self._whole += whole * count
            done += count
            if progress:
                progress(done, total)
        return best

    def _chunk(self, width: int, ids: np.ndarray) -> int:
        if width == 1:
            return self.step(int(ids[0]))
        self._last = call = self._take(self._prefill[width], ids)
        return call.argmax()

    def _take(self, prepared: tuple[Call, Buffer], ids: np.ndarray) -> Call:
        """Appends `ids` by a call of at least as many."""
        call, tokens = prepared
        tokens.array[: ids.size] = ids
        tokens.array[ids.size :] = 0
        self._position_word[0], self._length_word[0] = self._position, ids.size
        call.invoke()
        self._position += int(ids.size)
        self._last = None
        return call

    @alone
    def verify(self, tokens: Sequence[int]) -> list[int]:
        """Appends `tokens`, as many as a verify function takes, and returns the most probable token after each, -1 where its
        logits are no numbers.

        `rewind` takes back those that were not wanted. SessionError for another number of tokens, an id outside the
        vocabulary or an end past the context.
        """
        if len(tokens) not in self._verify:
            widths = ", ".join(map(str, self._verify)) or "none: compile the bundle with --speculate"
            raise SessionError(f"{len(tokens)} tokens cannot be verified at once; the bundle's widths are {widths}")
        self._checked(tokens)
        call, buffer = self._verify[len(tokens)]
        buffer.array[:] = tokens
        self._position_word[0] = self._position
        call.invoke()
        self._position += len(tokens)
        self._last = Row(call, len(tokens) - 1)
        return call.argmaxes(len(tokens))

    @alone
    def verify_fewer(self, tokens: Sequence[int], width: int) -> bool:
        """`verify` of fewer tokens than the `width` of a verify function, whose other rows are forgotten at once. False, and
        nothing is done, where those have no room or the states could not forget them."""
        ids, call_end = self._checked(tokens), self._position + width
        end = self._position + int(ids.size)
        if call_end > self.context or not all(state.returns(call_end, end) for state in self._states):
            return False
        call, buffer = self._verify[width]
        buffer.array[: ids.size], buffer.array[ids.size :] = ids, 0
        self._position_word[0] = self._position
        call.invoke()
        for state in self._states:
            state.go_back(call_end, end)
        self._position, self._last = end, Row(call, int(ids.size) - 1)
        return True

    @alone
    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Appends `tokens` and returns the hidden state of each after the last norm, f32 `[tokens, hidden]`.

        SessionError for a bundle without embed functions, no tokens, an id outside the vocabulary or an end past the context,
        which is counted in whole calls here. There are no logits after it.
        """
        if not self._embed:
            raise SessionError("this bundle gives no hidden states: compile it with --embed 128")
        ids = self._checked(tokens)
        widest = max(self._embed)
        parts = [ids[start : start + widest] for start in range(0, ids.size, widest)]
        widths = [min(width for width in self._embed if width >= part.size) for part in parts]
        if self._position + sum(widths) > self.context:
            raise SessionError(f"{ids.size} tokens in calls of {widest} would end past the context of {self.context}")
        return np.concatenate([self._take(self._embed[w], part).rows(part.size) for w, part in zip(widths, parts, strict=True)])

    @alone
    def verified_logits(self, token: int | None = None) -> np.ndarray:
        """The logits after each token of the last `verify`, f32 `[tokens, vocab]`, or after the one of this index, f32
        `[vocab]`; a copy. SessionError if another call, or none, came last."""
        return np.stack(list(self.verified_rows())) if token is None else self._verified().call.logits(token)

    def verified_rows(self) -> Iterator[np.ndarray]:
        """The same, one row f32 `[vocab]` after another; to be taken before the next call."""
        last = self._verified()
        return (last.call.logits(row) for row in range(last.row + 1))

    def _verified(self) -> Row:
        """The last row of the last `verify`."""
        if not isinstance(self._last, Row):
            raise SessionError("there are no logits of several tokens: verify first")
        return self._last

    def reachable(self, position: int) -> int:
        """The last position up to `position` at which the session can stand: itself, unless a state has forgotten it."""
        if not 0 <= position <= self._position:
            raise SessionError(f"a session at position {self._position} cannot be rewound to {position}")
        if all(state.returns(self._position, position) for state in self._states):
            return position
        return max((kept.position for kept in self._kept if kept.position <= position), default=0)

    @alone
    def rewind(self, position: int) -> None:
        """Forgets every token from `position` on; SessionError for a position that is not `reachable`."""
        found = self.reachable(position)
        if found != position:
            raise SessionError(f"this model does not remember its state at position {position}: it can go back to {found}")
        if position == self._position:
            return
        if all(state.returns(self._position, position) for state in self._states):
            for state in self._states:
                state.go_back(self._position, position)
            self._stand_at(position)
        else:
            self.restore(self._kept_at(position))

    @alone
    def snapshot(self, ahead: int | None = None) -> Snapshot:
        """What `restore` needs to come back to this position after up to `ahead` more, or however far the session goes on."""
        ahead = self.context - self._position if ahead is None else ahead
        taken = Snapshot(self._position, tuple(state.save(self._position, ahead) for state in self._states))
        self._snapshots.add(taken)
        return taken

    @alone
    def restore(self, snapshot: Snapshot) -> None:
        """Stands where the snapshot was taken; SessionError if the session has been before that place since."""
        if snapshot not in self._snapshots or snapshot.stale:
            raise SessionError(f"the snapshot of position {snapshot.position} is not of this session's present tokens")
        for state, saved in zip(self._states, snapshot.saved, strict=True):
            state.restore(self._position, snapshot.position, saved)
        self._stand_at(snapshot.position)

    @alone
    def keep(self) -> None:
        """Remembers this position, so that `rewind` can come back to it whatever the states are; the last `KEPT` count, fewer
        if what they take is more than `KEPT_BYTES`."""
        everywhere = all(state.returns(self.context, self._position) for state in self._states)
        if not everywhere and all(kept.position != self._position for kept in self._kept):
            self._kept.append(self.snapshot())
            while len(self._kept) > 1 and sum(kept.nbytes for kept in self._kept) > KEPT_BYTES:
                self._kept.popleft()

    @alone
    def copy_from(self, other: Session, position: int) -> None:
        """Takes over what a session of the same program was at `position`, which it must be able to reach."""
        if other.program is not self.program or other.reachable(position) != position:
            raise SessionError(f"position {position} cannot be copied from a session at {other.position}")
        direct = all(state.returns(other.position, position) for state in other._states)
        saved = (None,) * len(self._states) if direct else other._kept_at(position).saved
        self._stand_at(0)
        for mine, theirs, kept in zip(self._states, other._states, saved, strict=True):
            mine.copy(theirs, other._position, position, kept)
        self._position = position
        self._whole = self._whole_before(position, other._whole)

    def rows(self, position: int) -> list[np.ndarray]:
        """What each state holds of the first `position` tokens, of which the session has taken in no more: views."""
        return [state.rows(position) for state in self._states]

    def begins(self, tokens: int, position: int) -> bool:
        """Whether the rows after so many tokens are also those after the first `position` of them."""
        return all(state.begins(tokens, position) for state in self._states)

    @property
    def settled(self) -> bool:
        """Whether nothing was read past the present position that a state still holds."""
        return all(state.settled(self._position) for state in self._states)

    @alone
    def take(self, rows: Sequence[np.ndarray], position: int, whole: int = 0) -> None:
        """Stands at `position`, with the `rows` that a session of this bundle had there, or further on where `begins` allows
        it; `whole` as that session had it."""
        self._stand_at(0)
        for state, array in zip(self._states, rows, strict=True):
            state.take(array, position)
        self._position = position
        self._whole = self._whole_before(position, whole)

    def _whole_before(self, position: int, whole: int) -> int:
        """Of `whole` tokens, what is left at `position`."""
        return min(whole, position // self.widest * self.widest)

    def _kept_at(self, position: int) -> Snapshot:
        return next(kept for kept in self._kept if kept.position == position)

    def _stand_at(self, position: int) -> None:
        """Notes a position not after the present one; snapshots after it hold no longer."""
        self._position, self._last = position, None
        self._whole = self._whole_before(position, self._whole)
        for snapshot in self._snapshots:
            snapshot.stale |= snapshot.position > position
        self._kept = deque((kept for kept in self._kept if not kept.stale), KEPT)

    @alone
    def logits(self) -> np.ndarray:
        """The logits after the last token, f32 `[vocab]`, a copy; SessionError before a token or after a rewind."""
        if self._last is None:
            raise SessionError("there are no logits yet: prefill or step first")
        return self._last.copy() if isinstance(self._last, np.ndarray) else self._last.logits()

    @alone
    def fork(self) -> Session:
        """A session of its own that goes on from here, with a copy of the states."""
        other = Session(self.program)
        other.copy_from(self, self._position)
        other._last = None if self._last is None else self.logits()
        return other

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        """`tokens` as an array; SessionError if the session cannot take them."""
        ids = np.asarray(tokens)
        if not ids.size:
            raise SessionError("there are no tokens to take")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise SessionError(f"tokens are {ids.dtype}{list(ids.shape)}, not a list of whole numbers")
        if ids.min() < 0 or ids.max() >= self.vocab:
            outside = next(int(t) for t in ids if not 0 <= t < self.vocab)
            raise SessionError(f"token {outside} is outside the vocabulary of {self.vocab}")
        if self._position + ids.size > self.context:
            raise SessionError(
                f"{ids.size} token{'s' * (ids.size > 1)} from position {self._position} would end past the context of "
                f"{self.context}: shorten the prompt or compile with a larger --context"
            )
        return ids


class Row:
    """Logits at one row of a call's results, until the next call."""

    def __init__(self, call: Call, row: int):
        self.call, self.row = call, row

    def logits(self) -> np.ndarray:
        return self.call.logits(self.row)
