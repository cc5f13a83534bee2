"""The calling convention of compiled modules: the functions that a module may export.

The package `emitter` writes modules that follow this convention, and `vmfb` calls their functions.
This file imports the standard library only.

    decode_step(token i32, position i32, *states)                   -> (argmax i32, logits f32[V], *states)
    prefill_T(tokens i32[T], start i32, length i32, *states)        -> (argmax i32, logits f32[V], *states)
    verify_T(tokens i32[T], start i32, *states)                     -> (argmax i32[T], logits f32[T, V], *states)
    decode_batch_T(tokens i32[T], positions i32[T], *states)        -> (argmax i32[T], logits f32[T, V], *states)
    embed_T(tokens i32[T], start i32, length i32, *states)          -> (hidden f32[T, H], *states)
    encode_T(tokens i32[T], start i32, length i32, *states)         -> (embedding f32[H], *states)

T: tokens of a call, padding included. V: vocabulary size. H: features of a hidden state.
start: position of the first token. length: number of tokens that are not padding.

In `decode_batch_T` each token belongs to another sequence, and each state has the data of all T
sequences, concatenated along dimension 0. A sequence with a negative position is skipped.

LongRoPE rotates all tokens of a sequence by other frequencies once it is longer than the model's
original context. If the compiled context is longer, each function of one sequence has a variant for
such sequences, with the suffix `_long`. In `decode_batch_T`, a token at a position from the original
context on belongs to such a sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

# exact: activations are not rounded. canonical: nor do bits depend on the CPU or on the number of tokens in a call, which
# needs slower matmuls of several tokens on AMX, and on x86 CPUs without VNNI. fast: activations, and perhaps weights, are
# rounded in calls of several tokens. draft: in calls of one token too, where that is faster; for draft models.
NUMERICS = ("exact", "canonical", "fast", "draft")
# kernels: castiron's own for CPUs. portable: StableHLO only. gpu: castiron's own for GPUs.
LOWERINGS = ("kernels", "portable", "gpu")
# Types to which weights can be converted. A mix, here with the type of most matrices, has several, as in llama.cpp.
FLOATS = ("f32", "bf16", "f16")
MIXES = {"q4_k_m": "q4_k", "q5_k_m": "q5_k"}
QUANTISED = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", *MIXES)
# "native": as in the checkpoint.
WEIGHTS = ("native", *FLOATS, *QUANTISED)
# Element type of a state's buffer by storage; emitter/layers/kv_cache.py has the row formats.
STORAGE: dict[str, str] = {"f32": "f32", "f16": "f16", "q8_0": "i8"}
ELEMENT_BYTES = {"f32": 4, "f16": 2, "i8": 1, "i32": 4}
# How dimension 1 of a state relates to positions; dimension 0 is its layers.
#   positional  [layers, context, ...]: row p belongs to position p and is written once
#   window      [layers, rows, ...]: a ring buffer of at least `ring_rows` rows; position p is in row p mod rows
#   recurrent   [layers, ...]: every token replaces the data; zeros before the first token
KINDS = ("positional", "window", "recurrent")


@dataclass(frozen=True)
class Tensor:
    """The name, shape and element type of an operand or result of a function."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """Return shape and element type in MLIR's notation: `8x64xf32`, or `i32` for a scalar."""
        return "x".join((*map(str, self.shape), self.dtype))


@dataclass(frozen=True)
class State:
    """A buffer with state of one sequence, such as a KV cache, which every call updates in place.

    kind: one of `KINDS`.
    window: for the kind "window", how many positions a token attends to, its own included; else 0.
    layers: the model's layer of each index of dimension 0, such as (3, 7).
    """

    name: str
    shape: tuple[int, ...]
    kind: str = "positional"
    window: int = 0
    storage: str = "f32"
    layers: tuple[int, ...] = ()

    @property
    def dtype(self) -> str:
        return STORAGE[self.storage]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]

    def of(self, sequences: int) -> Tensor:
        """Return the buffer type for several sequences, concatenated along dimension 0."""
        return Tensor(self.name, (sequences * self.shape[0], *self.shape[1:]), self.dtype)

    def problem(self) -> str | None:
        """Return what is wrong with the fields of this state, or None if it is valid."""
        if self.kind not in KINDS:
            return f"kind is {self.kind!r}, not one of {', '.join(KINDS)}"
        if self.storage not in STORAGE:
            return f"storage is {self.storage!r}, not one of {', '.join(STORAGE)}"
        if len(self.shape) < (1 if self.kind == "recurrent" else 2) or min(self.shape) < 1:
            return f"shape {list(self.shape)} is invalid for a {self.kind} state"
        if (self.kind == "window") != (self.window > 0):
            return f"window {self.window} is invalid for a {self.kind} state"
        return None


def ring_rows(window: int, tokens: int) -> int:
    """Return how many rows a ring buffer of `window` positions needs for calls of `tokens` tokens.

    With fewer rows, the last tokens of a call would overwrite rows that its first tokens need.
    """
    return window + tokens


@dataclass(frozen=True)
class Role:
    """A kind of function that compiled modules export, such as prefill.

    operands, results: shapes by name, without the states; T, V and H as above.
    every_token: whether the results need the hidden states of all tokens, not only of the last one.
    """

    name: str
    operands: Mapping[str, tuple[str, ...]]
    results: Mapping[str, tuple[str, ...]]
    every_token: bool


_CHUNK: dict[str, tuple[str, ...]] = {"tokens": ("T",), "start": (), "length": ()}
_LAST: dict[str, tuple[str, ...]] = {"argmax": (), "logits": ("V",)}
_EVERY: dict[str, tuple[str, ...]] = {"argmax": ("T",), "logits": ("T", "V")}
ROLES: dict[str, Role] = {
    "decode": Role("decode_step", {"token": (), "position": ()}, _LAST, False),
    "prefill": Role("prefill_{}", _CHUNK, _LAST, False),
    "verify": Role("verify_{}", {"tokens": ("T",), "start": ()}, _EVERY, True),
    "batch": Role("decode_batch_{}", {"tokens": ("T",), "positions": ("T",)}, _EVERY, True),
    "embed": Role("embed_{}", _CHUNK, {"hidden": ("T", "H")}, True),
    "encode": Role("encode_{}", _CHUNK, {"embedding": ("H",)}, True),
}


@dataclass(frozen=True)
class Signature:
    """The types of a function's operands and results in order, states included."""

    operands: tuple[Tensor, ...]
    results: tuple[Tensor, ...]


@dataclass(frozen=True)
class Function:
    """An exported function, such as `prefill_32`, which has the role "prefill" and the width 32.

    is_long: whether it runs sequences longer than the model's original context.
    """

    role: str
    width: int = 1
    is_long: bool = False

    @property
    def name(self) -> str:
        return ROLES[self.role].name.format(self.width) + "_long" * self.is_long

    @property
    def sequences(self) -> int:
        return self.width if self.role == "batch" else 1

    def signature(self, states: Iterable[State], vocab: int, hidden: int = 0) -> Signature:
        """Return the types of operands and results; "embed" and "encode" need `hidden`."""
        extents, carried = {"T": self.width, "V": vocab, "H": hidden}, tuple(s.of(self.sequences) for s in states)

        def tensors(shapes: Mapping[str, tuple[str, ...]], dtype: str | None = None) -> tuple[Tensor, ...]:
            named = ((name, tuple(extents[n] for n in shape)) for name, shape in shapes.items())
            return tuple(Tensor(n, shape, dtype or ("i32" if n == "argmax" else "f32")) for n, shape in named) + carried

        role = ROLES[self.role]
        return Signature(tensors(role.operands, "i32"), tensors(role.results))


def functions(widths: Mapping[str, Iterable[int]], with_long: bool = False) -> tuple[Function, ...]:
    """Return a module's functions, in the order of export, for the widths of each role."""
    short = [Function(role, width) for role in ROLES for width in widths.get(role, ())]
    return *short, *(replace(f, is_long=True) for f in short if with_long and f.role != "batch")
