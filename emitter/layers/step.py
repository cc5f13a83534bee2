"""Classes with which layers build a graph: `Weight`, `ModelModule`, and `Step` for one function."""

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

    codec: the format in which the bundle stores the weight (a key of `CODECS` in `emitter.codecs`).
    transform: a function that is applied to the f32 values before they are stored. Then the codec
        is f32.
    values: a function that computes the tensor, if it is not in the checkpoint.
    parts: (name, shape) of the checkpoint tensors whose rows are stacked; default: tensor `name`.
    groups, rows: select some of the stacked rows, such as those of q in a fused qkv projection. The
        rows are divided into `groups` equal groups, and the weight has rows[0] to rows[1] - 1 of
        each group. By default, it has all rows.
    apart: (number of heads, n), to reorder the first n rows of each head for rotary embeddings. In
        the checkpoint, rows 2i and 2i + 1 are rotated together. The bundle stores rows 0, 2, 4, ...
        of each head before rows 1, 3, 5, ...
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
        """Return (name, shape) of each checkpoint tensor from which this weight is made.

        It is empty if `values` computes the weight.
        """
        if self.values is not None:
            return ()
        return self.parts or ((self.name, self.shape),)

    def raw(self, *tensors: np.ndarray) -> np.ndarray:
        """Return the bytes of this weight's rows, u8 [*shape[:-1], row_bytes].

        tensors: the bytes of each checkpoint tensor of `self.tensors`, in the weight's codec. The
        method stacks their rows, then selects and reorders them (see `rows`, `groups`, `apart`).
        """
        if self.rows is None and self.apart is None and len(tensors) == 1:
            return tensors[0]
        counts = (prod(shape[:-1]) if len(shape) > 1 else shape[0] for _, shape in self.tensors)
        rows = np.concatenate([t.reshape(count, -1) for t, count in zip(tensors, counts, strict=True)])
        own = rows.reshape(self.groups, -1, rows.shape[1])[:, slice(*(self.rows or (None,)))]
        own = self._apart(own.reshape(-1, rows.shape[1]))
        return own.reshape(-1) if len(self.shape) == 1 else own

    def _apart(self, rows: np.ndarray) -> np.ndarray:
        if self.apart is None:
            return rows
        heads, turning = self.apart
        own = rows.reshape(heads, -1, rows.shape[1])
        order = (slice(0, turning, 2), slice(1, turning, 2), slice(turning, None))
        return np.concatenate([own[:, part] for part in order], 1).reshape(rows.shape)


def source(weights: Sequence[Weight], pack: Callable[..., np.ndarray]) -> Source:
    """Return the recipe for an array of the weights file: the checkpoint tensors and a function.

    weights: the weights that the array consists of.
    pack: a function that gets the bytes of each weight, u8 [*shape[:-1], row_bytes], and returns
        the array to store.
    """

    def pack_tensors(*tensors: np.ndarray) -> np.ndarray:
        left = iter(tensors)
        return pack(*(w.raw(*islice(left, len(w.tensors))) for w in weights))

    return Source(tuple((name, w.codec) for w in weights for name, _ in w.tensors), pack_tensors)


class ModelModule(Module):
    """The functions of a model as graphs of layer operations, such as attention, before lowering.

    codecs: a function from the name of a checkpoint tensor to the codec in which it is stored.
    orders: for weights whose columns are permuted, as with GPTQ's act-order. Maps the name of the
        weight to the name of the tensor that contains the permutation.
    reordered: the names of those weights of `orders` that a layer has read so far.
    weights: the tensors and tables that the module reads, by name.
    """

    def __init__(self, name: str, codecs: Callable[[str], str], orders: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__(name)
        self.codecs, self.orders, self.reordered = codecs, orders, set[str]()
        self.weights: dict[str, Weight] = {}

    @contextmanager
    def step(self, entry: Function, states: Sequence[State], context: int) -> Iterator[Step]:
        """Add a function to the module; yield a `Step`, which has the function's inputs and states.

        Layers called in the `with` block append their operations to the function.
        entry: the function's role and number of tokens.
        states: the KV caches and recurrent states that the function updates.
        context: the max number of tokens in a sequence.
        """
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
            yield Step(self, entry.role, tokens, start, function.length, carried, {s.name: s for s in states}, context)

    def weight(self, weight: Weight) -> Value:
        """Append an operation that reads `weight` to the function being built; return its value."""
        for name, shape in weight.tensors or ((weight.name, weight.shape),):
            known = self.weights.setdefault(name, weight if name == weight.name else Weight(name, shape, weight.codec))
            if known.shape != shape:
                raise EmitError(f"weight {name} is read with two shapes: {known.shape} and {shape}; use one shape")
        known = self.weights.get(weight.name, weight)
        return append("weight", (), (TensorType(weight.shape, F32),), {"weight": known})[0]


@dataclass(eq=False)
class Step:
    """The function that is being built: its inputs and its states (KV caches, recurrent states).

    module: the module that gets the function.
    role: what the function does: "decode", "prefill" or another key of `abi.ROLES`.
    tokens: token ids, i32 [T]: T tokens of one sequence, or in a batch one token of each of T
        sequences.
    start: the position of the first token, i32; in a batch the position of each token, i32 [T],
        which is negative for an idle sequence.
    length: how many tokens are not padding, i32; None if there is no padding.
    states: the current value of each state, by name. Layer operations replace this value.
        Dimension 0 is the layers; in a batch, it is the layers of the first sequence, then those
        of the second, and so on.
    records: the `State` (shape, kind, layers) of each value in `states`, by name.
    context: the max number of tokens in a sequence.
    hidden: the final hidden states that `layers.lm_head` got, [rows, hidden]: in prefill those of
        the last token that is not padding, otherwise those of all tokens; None before that call.
    reordered: a cache of values whose features were permuted to match a weight with permuted
        columns. Key: (original value, name of the tensor that contains the permutation).
    """

    module: ModelModule
    role: str
    tokens: Value
    start: Value
    length: Value | None
    states: dict[str, Value]
    records: Mapping[str, State]
    context: int
    hidden: Value | None = None
    reordered: dict[tuple[Value, str], Value] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        """Return "prefill" if the role is "embed" or "encode", otherwise the role.

        Layers treat the tokens of these three roles in the same way.
        """
        return "prefill" if self.role in ("embed", "encode") else self.role

    @property
    def sequences(self) -> int:
        """Return how many sequences a call of the function processes: T for a batch, else 1."""
        return self.tokens.shape[0] if self.mode == "batch" else 1

    def cache_of(self, layer: int) -> tuple[tuple[str, str], int]:
        """Return where a layer's KV cache is: ((name of key state, name of value state), index).

        layer: the layer's index in the model.
        index: the layer's index in dimension 0 of both states.
        """
        keys, values = (s for s in self.records.values() if layer in s.layers and s.kind != "recurrent")
        return (keys.name, values.name), keys.layers.index(layer)

    def weight(self, name: str, shape: Sequence[int], codec: str | None = None, transform=None) -> Value:
        """Return the checkpoint tensor `<module path>.<name>` as a value of type f32.

        The module path is that of the current scope, such as "model.layers.0.mlp".
        codec: the format in which the bundle stores the tensor; by default `module.codecs` decides.
        transform: a function that is applied to the tensor's f32 values before they are stored.
        """
        full = ".".join(filter(None, (current_path(), name)))
        return self.module.weight(Weight(full, tuple(shape), codec or self.module.codecs(full), transform))

    def vector(self, name: str, shape: Sequence[int], transform=None) -> Value:
        """Return the checkpoint tensor `<module path>.<name>`, such as a bias, stored in f32.

        transform: a function that is applied to the tensor's values before they are stored.
        """
        return self.weight(name, shape, "f32", transform)

    def stack(self, name: str, parts: Sequence[str], shape: Sequence[int]) -> Value:
        """Stack checkpoint tensors of one shape to one weight, and return it.

        name: the name of the new weight.
        parts: the names of the tensors, in order. Names are relative to the current module path.
        shape: the shape of each tensor. Tensors [out, in] become [len(parts) * out, in], and
            vectors [n] become [len(parts), n].
        The stack is stored in the codec of the tensors, or in f32 if the tensors are vectors or
        have different codecs.
        """
        path = current_path()
        names = [f"{path}.{part}" for part in parts]
        codecs = {self.module.codecs(n) for n in names} if len(shape) > 1 else {"f32"}
        rows = len(parts) * (shape[0] if len(shape) > 1 else 1)
        codec = codecs.pop() if len(codecs) == 1 else "f32"
        full = Weight(f"{path}.{name}", (rows, shape[-1]), codec, parts=tuple((n, tuple(shape)) for n in names))
        return self.module.weight(full)

    def table(self, name: str, shape: Sequence[int], values: Callable[[], np.ndarray]) -> Value:
        """Return an f32 tensor that is not in the checkpoint, such as a table of cosines.

        values: a function that computes the tensor when the weights file is written.
        """
        return self.module.weight(Weight(name, tuple(shape), values=values))
