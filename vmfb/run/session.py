"""Sequences: a session has the states of one and appends tokens to it; a batch has several."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.device.open_program import open_program
from castiron.vmfb.device.program import Buffer, Call, NanLogitsError, Program, SessionError, exclusive
from castiron.vmfb.run.chunks import chunks
from castiron.vmfb.run.decode_plan import Cover, Span, costs_of
from castiron.vmfb.run.states import KINDS, Snapshot

# Max number and total bytes of the snapshots for `rewind`; the last one may be larger.
MAX_SNAPSHOTS, MAX_SNAPSHOT_BYTES = 4, 2**28


class Session:
    """The states of one sequence, and the methods that append tokens.

    Sessions of one `program` (see `fork`) run one at a time: a call raises SessionError while
    another thread runs one, and in a forked child. Only written positions use memory.

    LongRoPE rotates all tokens by other frequencies once a sequence is longer than the model's
    original context. A call that crosses this length, in either direction, first computes the
    states again from the tokens, as HF does. The option `total` of a call is the length of the
    sequence, if more tokens than those of the call will follow.

    tokens: the appended ids, i32 [context]; the first `position` are valid.
    position: number of tokens in the states, which is the position of the next token.
    is_long: whether the states are those of a sequence longer than the original context.
    widest: width of the largest prefill function.
    chunked_tokens: number of first tokens that were appended in full chunks of `widest` tokens.
        Sessions that appended the same tokens in such chunks have bit-identical states.
    """

    def __init__(
        self, source: Bundle | Path | str | Program, threads: int | None = None, states: Sequence[Buffer] | None = None
    ):
        """Start an empty sequence; SessionError for an embedding model.

        threads: None for one per physical core.
        states: zeroed buffers in the manifest's order; by default the session allocates them.
        """
        self.program = program = source if isinstance(source, Program) else open_program(source, threads)
        self.manifest = manifest = program.manifest
        if manifest.encoder:
            raise SessionError(f"{manifest.name} is an embedding model and cannot generate text; use `castiron embed`")
        self.context, self.vocab, self.threads = manifest.context, manifest.vocab, program.threads
        self.position = self.chunked_tokens = 0
        self.tokens = np.zeros(self.context, np.int32)
        self.widest = max(manifest.widths("prefill"), default=1)
        states = tuple(states or (program.state(state.shape, state.dtype) for state in manifest.states))
        self._states = [KINDS[s.kind](buffer.array, s.window) for s, buffer in zip(manifest.states, states, strict=True)]
        self._retained: deque[Snapshot] = deque(maxlen=MAX_SNAPSHOTS)
        self._snapshots: weakref.WeakSet[Snapshot] = weakref.WeakSet()
        token, position, length = (program.zeros((), "i32") for _ in range(3))
        # Memory views, because assigning a NumPy scalar takes twice as long.
        self._token_word, self._position_word, self._length_word = token.words, position.words, length.words

        def calls(role: str, is_long: bool, *numbers: Buffer) -> dict[int, tuple[Call, Buffer]]:
            tokens = {width: program.zeros((width,), "i32") for width in manifest.widths(role)}
            functions = {width: manifest.function(role, width, is_long) for width in tokens}
            return {w: (program.call(functions[w], (t, *numbers, *states)), t) for w, t in tokens.items()}

        self._functions = [
            (
                program.call(manifest.function("decode", 1, is_long), (token, position, *states)),
                calls("prefill", is_long, position, length),
                calls("verify", is_long, position),
                calls("embed", is_long, position, length),
            )
            for is_long in ((False,) if manifest.original_context is None else (False, True))
        ]
        self._use(False)
        # The kernels skip rows past the length; StableHLO computes them.
        self._padding = 0.0 if manifest.lowering == "kernels" else 1.0
        self._last: Call | Row | np.ndarray | None = None

    def _use(self, is_long: bool) -> None:
        self.is_long = is_long
        self._decode, self._prefill, self._verify, self._embed = self._functions[is_long]

    def is_valid_for(self, total: int) -> bool:
        """Return whether a sequence of `total` tokens can have the states of this one."""
        return self.is_long == self.manifest.is_long(total)

    def prepare(self, total: int) -> None:
        """Compute the states again if they are not valid for a sequence of `total` tokens."""
        if not self.is_valid_for(total):
            tokens = self.tokens[: self.position].copy()
            self.rewind(0)
            self._use(not self.is_long)
            if tokens.size:
                self._read(tokens)

    @exclusive
    def step(self, token: int) -> int:
        """Append one token; return the argmax of the logits after it (the lowest id on a tie)."""
        if self.position >= self.context or not 0 <= token < self.vocab:
            self._checked((token,))
        self.prepare(self.position + 1)
        return self._step(token)

    def _step(self, token: int) -> int:
        position = self.position
        self._token_word[0] = self.tokens[position] = token
        self._position_word[0] = position
        call = self._decode
        call.invoke()
        self.position = position + 1
        self._last = call
        return call.argmax()

    @exclusive
    def prefill(self, tokens: Sequence[int], progress: Callable[[int, int], None] | None = None, total: int = 0) -> int:
        """Append `tokens` in chunks, and return the argmax of the logits after the last token.

        progress: called with (tokens done, total) after each chunk. SessionError, before any work,
        if the tokens are invalid or end past the context.
        """
        ids = self._checked(tokens)
        self.prepare(max(total, self.position + ids.size))
        return self._read(ids, progress)

    def _read(self, ids: np.ndarray, progress: Callable[[int, int], None] | None = None) -> int:
        done, total = 0, int(ids.size)
        best = 0
        for width, count in chunks(total, self.position, self.context, self.manifest.widths("prefill"), self._padding):
            full_chunk = self.chunked_tokens == self.position and width == count == self.widest
            if width == 1:
                best = self._step(int(ids[done]))
            else:
                self._last = call = self._append(self._prefill[width], ids[done : done + count])
                best = call.argmax()
            self.chunked_tokens += full_chunk * count
            done += count
            if progress:
                progress(done, total)
        return best

    def _append(self, prepared: tuple[Call, Buffer], ids: np.ndarray) -> Call:
        call, tokens = prepared
        tokens.array[: ids.size], tokens.array[ids.size :] = ids, 0
        self._position_word[0], self._length_word[0] = self.position, ids.size
        call.invoke()
        self.tokens[self.position : self.position + ids.size] = ids
        self.position += int(ids.size)
        self._last = None
        return call

    @exclusive
    def verify(self, tokens: Sequence[int], total: int = 0) -> list[int]:
        """Append `tokens` in one call; return the argmax after each token, or -1 for NaN logits.

        SessionError, before any work, if no verify function takes so many, or they are invalid.
        """
        if len(tokens) not in self._verify:
            if not self._verify:
                raise SessionError("this bundle has no verify functions; compile it with --verify-widths 2,4,8")
            widths = ", ".join(map(str, self._verify))
            raise SessionError(f"verify got {len(tokens)} tokens; the verify functions of this bundle take {widths}")
        ids = self._checked(tokens)
        self.prepare(max(total, self.position + ids.size))
        call = self._append(self._verify[len(tokens)], ids)
        self._last = Row(call, len(tokens) - 1)
        return call.argmaxes(len(tokens))

    @exclusive
    def verify_fewer(self, tokens: Sequence[int], width: int, total: int = 0) -> bool:
        """Append `tokens`, padded to a verify function of `width`, and remove the padding again.

        Return False, and do nothing, if that would end past the context or cannot be removed.
        """
        ids, call_end = self._checked(tokens), self.position + width
        end = self.position + int(ids.size)
        if call_end > self.context or not all(state.can_return(call_end, end) for state in self._states):
            return False
        self.prepare(max(total, end))
        call = self._append(self._verify[width], ids)
        for state in self._states:
            state.go_back(call_end, end)
        self._last = Row(call, int(ids.size) - 1)
        return True

    @exclusive
    def embed(self, tokens: Sequence[int]) -> np.ndarray:
        """Append `tokens`; return their hidden states after the last norm, f32 `[tokens, hidden]`.

        SessionError, before any work, if they are invalid or end past the context with padding.
        """
        if not self._embed:
            raise SessionError("this bundle has no embed function for hidden states; compile it with --embed 128")
        ids = self._checked(tokens)
        widest = max(self._embed)
        parts = [ids[start : start + widest] for start in range(0, ids.size, widest)]
        widths = [min(width for width in self._embed if width >= part.size) for part in parts]
        if self.position + sum(widths) > self.context:
            raise SessionError(
                f"too many tokens at position {self.position}: embed functions pad {ids.size} to {sum(widths)}, "
                f"which end past the context of {self.context}; give fewer tokens, or a larger --context"
            )
        self.prepare(self.position + ids.size)
        return np.concatenate(
            [self._append(self._embed[w], part).floats(0)[: part.size] for w, part in zip(widths, parts, strict=True)]
        )

    @exclusive
    def verified_logits(self, token: int | None = None) -> np.ndarray:
        """Return the logits after the last `verify`, f32 `[tokens, vocab]`, or of one token."""
        return np.stack(list(self.verified_rows())) if token is None else self._verified().call.logits(token)

    def verified_rows(self) -> Iterator[np.ndarray]:
        """Iterate over the logits of the last `verify`, before the session's next call."""
        last = self._verified()
        return (last.call.logits(row) for row in range(last.row + 1))

    def _verified(self) -> Row:
        if not isinstance(self._last, Row):
            raise SessionError("no verified logits: the last call of this session was not verify; call verify first")
        return self._last

    def reachable(self, position: int) -> int:
        """Return the largest position, not above `position`, that `rewind` can return to.

        If later tokens overwrote a state, it is that of the last snapshot of `keep`, or 0.
        """
        if not 0 <= position <= self.position:
            raise SessionError(f"cannot rewind a session at position {self.position} to {position}; give 0 to {self.position}")
        if all(state.can_return(self.position, position) for state in self._states):
            return position
        return max((snapshot.position for snapshot in self._retained if snapshot.position <= position), default=0)

    @exclusive
    def rewind(self, position: int) -> None:
        """Remove every token from `position` on; raise SessionError if it is not `reachable`."""
        found = self.reachable(position)
        if found != position:
            raise SessionError(f"cannot rewind to position {position}: its state is overwritten; rewind to {found} instead")
        if position == self.position:
            return
        if all(state.can_return(self.position, position) for state in self._states):
            for state in self._states:
                state.go_back(self.position, position)
            self._move_to(position)
        else:
            self.restore(self._retained_at(position))

    @exclusive
    def snapshot(self, ahead: int | None = None) -> Snapshot:
        """Copy what is needed to return to this position with `restore`.

        ahead: tokens that may be appended before; by default, as many as fit in the context.
        """
        ahead = self.context - self.position if ahead is None else ahead
        taken = Snapshot(self.position, tuple(state.save(self.position, ahead) for state in self._states))
        self._snapshots.add(taken)
        return taken

    @exclusive
    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this session; SessionError if it was rewound to before it."""
        if snapshot not in self._snapshots:
            raise SessionError(
                f"cannot restore the snapshot of position {snapshot.position}: it is from another session; "
                "restore a snapshot from this session"
            )
        if snapshot.stale:
            raise SessionError(
                f"cannot restore the snapshot of position {snapshot.position}: the session was later rewound "
                "to an earlier position; prefill the tokens again"
            )
        for state, saved in zip(self._states, snapshot.saved, strict=True):
            state.restore(self.position, snapshot.position, saved)
        self._move_to(snapshot.position)

    @exclusive
    def keep(self) -> None:
        """Store a snapshot for `rewind` if a state needs one; drop the oldest over the limits."""
        everywhere = all(state.can_return(self.context, self.position) for state in self._states)
        if not everywhere and all(snapshot.position != self.position for snapshot in self._retained):
            self._retained.append(self.snapshot())
            while len(self._retained) > 1 and sum(snapshot.nbytes for snapshot in self._retained) > MAX_SNAPSHOT_BYTES:
                self._retained.popleft()

    @exclusive
    def copy_from(self, other: Session, position: int) -> None:
        """Take over the states of `other` at `position`; SessionError if it cannot rewind to it."""
        if other.program is not self.program:
            raise SessionError("cannot copy states between sessions of different programs; open both sessions from one program")
        if (found := other.reachable(position)) != position:
            raise SessionError(
                f"cannot copy position {position} of a session at {other.position}: "
                f"its state is overwritten; copy position {found}"
            )
        direct = all(state.can_return(other.position, position) for state in other._states)
        saved = (None,) * len(self._states) if direct else other._retained_at(position).saved
        self._move_to(0)
        for mine, theirs, rows in zip(self._states, other._states, saved, strict=True):
            mine.copy(theirs, other.position, position, rows)
        self._use(other.is_long)
        self.tokens[:position] = other.tokens[:position]
        self.position = position
        self.chunked_tokens = self._chunked_before(position, other.chunked_tokens)

    def rows(self, position: int) -> list[np.ndarray]:
        """Return views of the states, in the manifest's order, for `take` of another session."""
        return [state.rows(position) for state in self._states]

    def begins(self, tokens: int, position: int) -> bool:
        """Return whether `rows(tokens)` can also continue at an earlier position.

        tokens: number of tokens when `rows` is called; at least `position`.
        """
        return all(state.begins(tokens, position) for state in self._states)

    @property
    def settled(self) -> bool:
        """Whether states have no data of tokens that a rewind removed, as ring buffers may."""
        return all(state.settled(self.position) for state in self._states)

    @exclusive
    def take(self, rows: Sequence[np.ndarray], tokens: Sequence[int], chunked_tokens: int = 0, is_long: bool = False) -> None:
        """Load what `rows(n)` of another session of the bundle returned, to continue its sequence.

        tokens: the first n, or fewer if the other session's `begins(n, len(tokens))` is true.
        chunked_tokens, is_long: those of the other session.
        """
        self._move_to(0)
        self._use(is_long)
        position = len(tokens)
        for state, array in zip(self._states, rows, strict=True):
            state.take(array, position)
        self.tokens[:position] = tokens
        self.position = position
        self.chunked_tokens = self._chunked_before(position, chunked_tokens)

    def _chunked_before(self, position: int, chunked_tokens: int) -> int:
        # The new `chunked_tokens` after a rewind to `position`.
        return min(chunked_tokens, position // self.widest * self.widest)

    def _retained_at(self, position: int) -> Snapshot:
        return next(snapshot for snapshot in self._retained if snapshot.position == position)

    def _move_to(self, position: int) -> None:
        self.position, self._last = position, None
        self.chunked_tokens = self._chunked_before(position, self.chunked_tokens)
        for snapshot in self._snapshots:
            snapshot.stale |= snapshot.position > position
        self._retained = deque((snapshot for snapshot in self._retained if not snapshot.stale), MAX_SNAPSHOTS)

    @exclusive
    def logits(self) -> np.ndarray:
        """Return the logits after the last token, f32 `[vocab]`; SessionError if there are none."""
        if self._last is None:
            raise SessionError("no logits yet; call prefill or step first")
        return self._last.copy() if isinstance(self._last, np.ndarray) else self._last.logits()

    @exclusive
    def fork(self) -> Session:
        """Return a new session at this position, with a copy of the states."""
        other = Session(self.program)
        other.copy_from(self, self.position)
        other._last = None if self._last is None else self.logits()
        return other

    def _checked(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.asarray(tokens)
        if not ids.size:
            raise SessionError("no tokens; give at least one")
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise SessionError(f"tokens have type {ids.dtype}{list(ids.shape)}; give a list of integers")
        if ids.min() < 0 or ids.max() >= self.vocab:
            outside = next(int(t) for t in ids if not 0 <= t < self.vocab)
            raise SessionError(
                f"token {outside} is outside the vocabulary of {self.vocab}; give ids from 0 to {self.vocab - 1}"
            )
        if self.position + ids.size > self.context:
            raise SessionError(
                f"{ids.size} token{'s' * (ids.size > 1)} from position {self.position} would end past the context of "
                f"{self.context}; shorten the prompt or give a larger --context"
            )
        return ids


class Row:
    """A reference to one row of the logits that `call` returned; `call.invoke` invalidates it."""

    def __init__(self, call: Call, row: int):
        self.call, self.row = call, row

    def logits(self) -> np.ndarray:
        return self.call.logits(self.row)


class Batch:
    """Slots of sequences that are decoded together, so that a call reads the weights only once.

    slots: a `Session` each. The bundle's functions `decode_batch_B` decode B adjacent slots; there
    are as many slots as the largest B. A call takes as long if some of its slots get no token, so
    several narrow calls may be faster than a wide one. The slots' states are parts of one buffer
    per state, joined along dimension 0.
    """

    def __init__(self, source: Bundle | Path | str | Session, threads: int | None = None, single: bool = False):
        """Load a bundle, or use an open session as the only slot; `single`: have only one slot."""
        self._calls: dict[Span, tuple[Call, memoryview, memoryview]] = {}
        if single or not isinstance(source, Bundle | Path | str):
            self.slots, self.size = [Session(source, threads) if isinstance(source, Bundle | Path | str) else source], 1
            return
        bundle = open_bundle(source)
        states, self.size = bundle.manifest.states, max(bundle.manifest.widths("batch"), default=1)
        self.program = program = open_program(bundle, threads, self.size)
        buffers = [program.state((self.size * s.shape[0], *s.shape[1:]), s.dtype) for s in states]

        def slots(first: int, last: int) -> list[Buffer]:
            return [b.part(first * s.shape[0], last * s.shape[0]) for s, b in zip(states, buffers, strict=True)]

        self.slots = [Session(program, states=slots(i, i + 1)) for i in range(self.size)]
        self._cover = Cover(self.size, costs_of(program.manifest))
        for first, width in self._cover.spans:
            if width > 1:
                tokens, positions = (program.zeros((width,), "i32") for _ in range(2))
                operands = tokens, positions, *slots(first, first + width)
                call = program.call(program.manifest.function("batch", width), operands)
                self._calls[first, width] = call, tokens.words, positions.words

    def step(self, tokens: Mapping[int, int]) -> dict[int, int]:
        """Append one token to each given slot; return the argmax after it by slot, -1 for NaN.

        SessionError, before any work, for an invalid slot or token, or a full context.
        """
        for slot in tokens:
            if not 0 <= slot < self.size:
                raise SessionError(f"slot {slot} does not exist; the batch has slots 0 to {self.size - 1}")
        if len(tokens) == 1:
            return {slot: self._step_single(slot, token) for slot, token in tokens.items()}
        for slot, token in tokens.items():
            session = self.slots[slot]
            if session.position >= session.context or not 0 <= token < session.vocab:
                session._checked((token,))
        found: dict[int, int] = {}
        for first, width in self._cover.of(tuple(sorted(tokens))):
            if width == 1:
                found[first] = self._step_single(first, tokens[first])
            else:
                found |= self._step_together((first, width), tokens)
        return found

    def _step_single(self, slot: int, token: int) -> int:
        try:
            return self.slots[slot].step(token)
        except NanLogitsError:
            return -1

    @exclusive
    def _step_together(self, span: Span, tokens: Mapping[int, int]) -> dict[int, int]:
        (call, words, positions), (first, width) = self._calls[span], span
        taken = [slot for slot in range(first, first + width) if slot in tokens]
        for slot in taken:
            self.slots[slot].prepare(self.slots[slot].position + 1)
        self._save_logits(call, taken)
        for row in range(width):
            words[row] = tokens.get(first + row, 0)
            positions[row] = self.slots[first + row].position if first + row in tokens else -1
        call.invoke()
        found = call.argmaxes(width)
        for slot in taken:
            session = self.slots[slot]
            session.tokens[session.position] = tokens[slot]
            session.position += 1
            session._last = Row(call, slot - first)
        return {slot: found[slot - first] for slot in taken}

    def _save_logits(self, call: Call, stepped: Collection[int]) -> None:
        """Copy logits of slots not in `stepped`, which the next run of `call` would overwrite."""
        for slot, session in enumerate(self.slots):
            if slot not in stepped and isinstance(session._last, Row) and session._last.call is call:
                session._last = session._last.logits()


def move_to(session: Session, position: int, fed: Sequence[int] = (), source: Session | None = None) -> None:
    """Move `session` to an earlier position, or to a position of the session `source`.

    fed: the tokens before `position`. If a state cannot return there, the session moves to the
    nearest earlier position, and appends the tokens from there again.
    """
    source = source or session
    found = source.reachable(position)
    if source is session:
        session.rewind(found)
    else:
        session.copy_from(source, found)
    if found < position:
        session.prefill(fed[len(fed) - (position - found) :])


def move_after(session: Session, before: Snapshot, tokens: Sequence[int]) -> None:
    """Move `session` to the position just after `tokens`, which it has appended earlier.

    before: a snapshot of the position before `tokens`, restored if `session` cannot rewind.
    """
    position = before.position + len(tokens)
    if session.reachable(position) == position:
        session.rewind(position)
    else:
        session.restore(before)
        if tokens:
            session.prefill(tokens)
