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
#   window      [layers, W, ...]: a ring of the last W positions, position p in row p mod W
#   recurrent   [layers, ...]: replaced at every token, zero before the first
KINDS = ("positional", "window", "recurrent")

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
    """One state of a sequence: its shape and element type, and its kind, one of `KINDS`."""

    name: str
    shape: tuple[int, ...]
    dtype: DType = F32
    kind: str = "positional"

    def __post_init__(self) -> None:
        least = 1 if self.kind == "recurrent" else 2
        if self.kind not in KINDS or len(self.shape) < least:
            raise EmitError(f"state {self.name!r} of shape {self.shape} is {self.kind!r}; known are {', '.join(KINDS)}")

    def type(self, sequences: int = 1) -> TensorType:
        """The type of the buffer of so many sequences."""
        return TensorType((sequences * self.shape[0], *self.shape[1:]), self.dtype)


def kv_cache(layers: int, context: int, kv_heads: int, head_dim: int) -> tuple[State, State]:
    """Keys and values of every layer at every position, each f32 [layers, context, kv_heads, head_dim]."""
    return State("k", shape := (layers, context, kv_heads, head_dim)), State("v", shape)


def stored_as(states: Sequence[State], cache: str) -> tuple[State, ...]:
    """The states with the rows of positional ones as `cache` stores them, a key of `CACHES`; EmitError for another.

    Rings and recurrent states are f32 always: a recurrence would add up its roundings, and neither grows with the context.
    """
    if cache not in CACHES:
        raise EmitError(f"cache {cache!r} is not one of {', '.join(CACHES)}")
    how = CACHES[cache]

    def stored(state: State) -> State:
        return replace(state, shape=(*state.shape[:-1], *how.row(state.shape[-1])), dtype=how.dtype)

    return tuple(stored(state) if state.kind == "positional" else state for state in states)


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
