"""What layers build a graph with: `Weight`, `ModelModule`, and `Step` for one function."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from types import MappingProxyType

import numpy as np

from castiron.emitter.abi import Function, State
from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Graph, Module, Source, Value, append, current_path
from castiron.emitter.graph.types import DTYPES, F32, EmitError, TensorType


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that the model reads: a tensor of the checkpoint, or one made from several.

    transform: applied to the f32 values before they are stored; the codec is f32.
    values: computes the tensor, if it is not in the checkpoint.
    parts: (name, shape) of the checkpoint tensors whose rows are stacked; default: tensor `name`.
    groups, rows: of each of `groups` equal groups of the stacked rows, the weight has `rows`
        (first, end), such as q of a fused qkv projection; None: all rows.
    apart: (heads, n): the first n rows of each head are stored as 0, 2, 4, ..., 1, 3, 5, ...,
        because the checkpoint rotates rows 2i and 2i + 1 together.
    """

    name: str
    shape: tuple[int, ...]
    codec: str = "f32"
    transform: Callable[[np.ndarray], np.ndarray] | None = None
    values: Callable[[], np.ndarray] | None = None
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    rows: tuple[int, int] | None = None
    groups: int = 1
    apart: tuple[int, int] | None = None

    @property
    def tensors(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Return (name, shape) of the checkpoint tensors; none if `values` computes the weight."""
        if self.values is not None:
            return ()
        return self.parts or ((self.name, self.shape),)

    def raw(self, *tensors: np.ndarray) -> np.ndarray:
        """Return the weight's bytes, u8 [*shape[:-1], row_bytes], from those of its tensors."""
        if self.rows is None and self.apart is None and len(tensors) == 1:
            return tensors[0]
        counts = (prod(shape[:-1]) if len(shape) > 1 else shape[0] for _, shape in self.tensors)
        rows = np.concatenate([t.reshape(count, -1) for t, count in zip(tensors, counts, strict=True)])
        selected = rows.reshape(self.groups, -1, rows.shape[1])[:, slice(*(self.rows or (None,)))]
        selected = self._apart(selected.reshape(-1, rows.shape[1]))
        return selected.reshape(-1) if len(self.shape) == 1 else selected

    def _apart(self, rows: np.ndarray) -> np.ndarray:
        if self.apart is None:
            return rows
        heads, turning = self.apart
        by_head = rows.reshape(heads, -1, rows.shape[1])
        order = (slice(0, turning, 2), slice(1, turning, 2), slice(turning, None))
        return np.concatenate([by_head[:, part] for part in order], 1).reshape(rows.shape)


def source(weights: Sequence[Weight], pack: Callable[..., np.ndarray]) -> Source:
    """Return the recipe of a stored array; `pack` gets the bytes of each weight (`Weight.raw`)."""

    def pack_tensors(*tensors: np.ndarray) -> np.ndarray:
        left = iter(tensors)
        return pack(*(w.raw(*islice(left, len(w.tensors))) for w in weights))

    return Source(tuple((name, w.codec) for w in weights for name, _ in w.tensors), pack_tensors)


class ModelModule(Module):
    """The functions of a model as graphs of layer operations, before lowering.

    codecs: from the name of a checkpoint tensor to the codec in which it is stored.
    orders: from a weight with permuted columns (GPTQ's act-order, Qwen 3.5's GGUF) to the name of
        the tensor with the permutation. reordered: the weights of `orders` that a layer has read.
    """

    def __init__(self, name: str, codecs: Callable[[str], str], orders: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(name)
        self.codecs, self.orders, self.reordered = codecs, orders, set[str]()
        self.weights: dict[str, Weight] = {}

    @contextmanager
    def step(self, entry: Function, states: Sequence[State], context: int) -> Iterator[Step]:
        """Add a function to the module; yield the `Step` with which layers build it."""
        for state in states:
            if problem := state.problem():
                raise EmitError(f"invalid state {state.name!r}: {problem}; correct its fields")
        operands = entry.signature(states, 0).operands
        inputs = {t.name: Value(TensorType(t.shape, DTYPES[t.dtype]), t.name) for t in operands}
        function = Graph(entry.name, list(inputs.values()), entry=entry, states=tuple(states))
        carried = {s.name: inputs.pop(s.name) for s in states}
        tokens, start, *length = inputs.values()
        function.length = length[0] if length else None
        with self.defining(function):
            tokens = ops.reshape(tokens, (entry.width,))
            records = {s.name: s for s in states}
            yield Step(self, entry.role, tokens, start, function.length, carried, records, context, entry.is_long)

    def weight(self, weight: Weight) -> Value:
        for name, shape in weight.tensors or ((weight.name, weight.shape),):
            known = self.weights.setdefault(name, weight if name == weight.name else Weight(name, shape, weight.codec))
            if known.shape != shape:
                raise EmitError(f"weight {name} is read with two shapes: {known.shape} and {shape}; use one shape")
        known = self.weights.get(weight.name, weight)
        return append("weight", (), (TensorType(weight.shape, F32),), {"weight": known})[0]


@dataclass(eq=False)
class Step:
    """The function that is being built: its inputs and its states (KV caches, recurrent states).

    role: a key of `abi.ROLES`.
    tokens: token ids, i32 [T]: of one sequence, or in a batch one token of each of T sequences.
    start: the position of the first token, i32; in a batch of each token, i32 [T], negative if
        idle.
    length: how many tokens are not padding, i32; None if there is no padding.
    states: the current value of each state, which layer operations replace. Dimension 0 is the
        layers, in a batch those of the first sequence, then those of the second, and so on.
    is_long: whether the sequence is longer than the model's original context (LongRoPE).
    records: the `State` of each value in `states`.
    hidden: what `layers.lm_head` got, [rows, hidden]; None before that call.
    reordered: from (value, tensor with a permutation) to the value with permuted features.
    """

    module: ModelModule
    role: str
    tokens: Value
    start: Value
    length: Value | None
    states: dict[str, Value]
    records: Mapping[str, State]
    context: int
    is_long: bool = False
    hidden: Value | None = None
    reordered: dict[tuple[Value, str], Value] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """Return the role, or "prefill" for "embed" and "encode", which layers treat alike."""
        return "prefill" if self.role in ("embed", "encode") else self.role

    @property
    def sequences(self) -> int:
        """Return how many sequences a call of the function processes: T for a batch, else 1."""
        return self.tokens.shape[0] if self.mode == "batch" else 1

    def cache_of(self, layer: int) -> tuple[tuple[str, str], int]:
        """Return where a layer's KV cache is: ((key state, value state), index in dimension 0)."""
        keys, values = (s for s in self.records.values() if layer in s.layers and s.kind != "recurrent")
        return (keys.name, values.name), keys.layers.index(layer)

    def weight(self, name: str, shape: Sequence[int], codec: str | None = None, transform=None) -> Value:
        """Return the tensor `<module path>.<name>` as f32, stored in `codec` or as the module says."""
        full = ".".join(filter(None, (current_path(), name)))
        return self.module.weight(Weight(full, tuple(shape), codec or self.module.codecs(full), transform))

    def vector(self, name: str, shape: Sequence[int], transform=None) -> Value:
        """Return the checkpoint tensor `<module path>.<name>`, such as a bias, stored in f32."""
        return self.weight(name, shape, "f32", transform)

    def stack(self, name: str, parts: Sequence[str], shape: Sequence[int]) -> Value:
        """Stack tensors: [out, in] to [len(parts) * out, in], or [n] to [len(parts), n].

        The codec is that of the tensors, or f32 for vectors and for tensors of different codecs.
        """
        path = current_path()
        names = [f"{path}.{part}" for part in parts]
        codecs = {self.module.codecs(n) for n in names} if len(shape) > 1 else {"f32"}
        rows = len(parts) * (shape[0] if len(shape) > 1 else 1)
        codec = codecs.pop() if len(codecs) == 1 else "f32"
        full = Weight(f"{path}.{name}", (rows, shape[-1]), codec, parts=tuple((n, tuple(shape)) for n in names))
        return self.module.weight(full)

    def table(self, name: str, shape: Sequence[int], values: Callable[[], np.ndarray]) -> Value:
        """Return an f32 tensor that is not in the checkpoint; `values` computes it."""
        return self.module.weight(Weight(name, tuple(shape), values=values))
