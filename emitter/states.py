"""What a sequence carries from call to call, and the functions that carry it on.

A state is one buffer, updated in place. What can be done with it (going back, copying a beginning) follows from its kind
alone, never from the model that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from castiron.emitter.caches import CACHES
from castiron.emitter.types import F32, I32, DType, EmitError, TensorType

# How dimension 1 relates to positions; dimension 0 stacks layers (of a batch: the layers of one sequence after another).
#   positional  [layers, context, ...]: row p is position p, written once
#   window      [layers, rows, ...]: a ring, position p in row p mod rows, of at least `ring_rows`
#   recurrent   [layers, ...]: replaced at every token, zero before the first
KINDS = ("positional", "window", "recurrent")
# What the names of states end in that layers with a window have.
SLIDING = "_sliding"

# Of each role: the function's name, and whether it has one row of results or one a token. Embed gives hidden states, encode
# makes one vector of a text of them, the others give logits.
ROLES: dict[str, tuple[str, bool]] = {
    "decode": ("decode_step", False),
    "prefill": ("prefill_{}", False),
    "verify": ("verify_{}", True),
    "batch": ("decode_batch_{}", True),
    "embed": ("embed_{}", True),
    "encode": ("encode_{}", True),
}


@dataclass(frozen=True)
class State:
    """One state of a sequence: its shape and element type, and its kind, one of `KINDS`.

    window: of a ring, how many positions a query sees, its own among them. layers: which of the model's layers it has, in
    this order; of () the model numbers those that it has by itself.
    """

    name: str
    shape: tuple[int, ...]
    dtype: DType = F32
    kind: str = "positional"
    window: int = 0
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        least = 1 if self.kind == "recurrent" else 2
        if self.kind not in KINDS or len(self.shape) < least:
            raise EmitError(f"state {self.name!r} of shape {self.shape} is {self.kind!r}; known are {', '.join(KINDS)}")
        if (self.kind == "window") != (self.window > 0):
            raise EmitError(f"state {self.name!r} is {self.kind!r} and has a window of {self.window}; rings alone have one")

    def type(self, sequences: int = 1) -> TensorType:
        """The type of the buffer of so many sequences."""
        return TensorType((sequences * self.shape[0], *self.shape[1:]), self.dtype)


def kv_cache(layers: int, context: int, kv_heads: int, head_dim: int) -> tuple[State, State]:
    """Keys and values of every layer at every position, each f32 [layers, context, kv_heads, head_dim]."""
    return State("k", shape := (layers, context, kv_heads, head_dim)), State("v", shape)


def layer_caches(windows: Sequence[int | None], context: int, kv_heads: int, head_dim: int) -> tuple[State, ...]:
    """Keys and values of every layer: `k` and `v` of those that see all positions, whose window is None, and rings
    `k_sliding` and `v_sliding` of the others, whose windows are equal."""
    found: list[State] = []
    for window in sorted(set(windows), key=bool):
        layers = tuple(layer for layer, own in enumerate(windows) if own == window)
        for state in kv_cache(len(layers), context, kv_heads, head_dim):
            found.append(replace(state, layers=layers) if window is None else ring(state, window, layers))
    return tuple(found)


def ring(state: State, window: int, layers: tuple[int, ...] = ()) -> State:
    """The ring that a cache of such positions, keys or values, becomes under a window."""
    return replace(state, name=state.name + SLIDING, kind="window", window=window, layers=layers)


def ring_rows(window: int, tokens: int) -> int:
    """Rows of a ring for calls of so many tokens: what the first of them sees still stands when the last has its row."""
    return window + tokens


def cut_to_rings(states: Sequence[State], tokens: int) -> tuple[State, ...]:
    """The states with as many rows in each ring as calls of so many tokens need; a ring of no fewer rows than positions is
    positional."""

    def cut(state: State) -> State:
        if state.kind != "window":
            return state
        if (rows := ring_rows(state.window, tokens)) >= state.shape[1]:
            return replace(state, kind="positional", window=0)
        return replace(state, shape=(state.shape[0], rows, *state.shape[2:]))

    return tuple(map(cut, states))


def stored_as(states: Sequence[State], cache: str) -> tuple[State, ...]:
    """The states with their rows as `cache` stores them, a key of `CACHES`; EmitError for another.

    Recurrent states are f32 always: a recurrence would add up its roundings, and they do not grow with the context.
    """
    if cache not in CACHES:
        raise EmitError(f"cache {cache!r} is not one of {', '.join(CACHES)}")
    how = CACHES[cache]

    def stored(state: State) -> State:
        return replace(state, shape=(*state.shape[:-1], *how.row(state.shape[-1])), dtype=how.dtype)

    return tuple(state if state.kind == "recurrent" else stored(state) for state in states)


def function_name(role: str, width: int) -> str:
    """`decode_step`, `prefill_T`, `verify_T`, `decode_batch_B`, `embed_T` and `encode_T`."""
    return ROLES[role][0].format(width)


def token_inputs(role: str, width: int) -> dict[str, TensorType]:
    """The inputs before the states, by name; `width` is how many tokens a call takes."""
    scalar, several = TensorType((), I32), TensorType((width,), I32)
    return {
        "decode": {"token": scalar, "position": scalar},
        **dict.fromkeys(("prefill", "embed", "encode"), {"tokens": several, "start": scalar, "length": scalar}),
        "verify": {"tokens": several, "start": scalar},
        "batch": {"tokens": several, "positions": several},
    }[role]
