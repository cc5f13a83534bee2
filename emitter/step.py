"""The weights that a model reads, and the step in which it reads them: what layer operations are written over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from math import prod

import numpy as np

from castiron.emitter import ops
from castiron.emitter.ir import Function, Module, Source, Value, append, current_path
from castiron.emitter.states import SLIDING, State, function_name, token_inputs
from castiron.emitter.types import F32, EmitError, TensorType


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor that the model reads.

    name, shape: the checkpoint's tensor, or the name of a table computed from the config.
    codec: how it is stored in the bundle (a key of `castiron.emitter.codecs.CODECS`).
    transform: applied to its f32 values before storing (`w + 1` of Gemma's norms); then the codec is f32.
    values: computes a table that is in no checkpoint.
    parts, rows, groups: the tensors (name, shape) whose rows are stacked, and the first and the past-the-last row it takes of
    each of so many equal groups of them, where it is not the one tensor of its name: a projection out of a fused one, the
    experts of a layer. A row of a vector is one number.
    apart: (heads, n) where the first n rows of each head, which the checkpoint holds in pairs, stand with the first of each
    pair before the second ones: a head that `layers.rope` turns interleaved is then turned half against half.
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
        """Name and shape of every checkpoint tensor that it is made of."""
        if self.values is not None:
            return ()
        return self.parts or ((self.name, self.shape),)

    def raw(self, *tensors: np.ndarray) -> np.ndarray:
        """Its bytes out of those of its `tensors`: uint8 [*shape[:-1], row_bytes]."""
        if self.rows is None and self.apart is None and len(tensors) == 1:
            return tensors[0]
        counts = (prod(shape[:-1]) if len(shape) > 1 else shape[0] for _, shape in self.tensors)
        rows = np.concatenate([t.reshape(count, -1) for t, count in zip(tensors, counts, strict=True)])
        own = rows.reshape(self.groups, -1, rows.shape[1])[:, slice(*(self.rows or (None,)))]
        own = self._apart(own.reshape(-1, rows.shape[1]))
        return own.reshape(-1) if len(self.shape) == 1 else own

    def _apart(self, rows: np.ndarray) -> np.ndarray:
        """Rows [out, bytes] in the order that `apart` says."""
        if self.apart is None:
            return rows
        heads, turning = self.apart
        own = rows.reshape(heads, -1, rows.shape[1])
        order = (slice(0, turning, 2), slice(1, turning, 2), slice(turning, None))
        return np.concatenate([own[:, part] for part in order], 1).reshape(rows.shape)


def source(weights: Sequence[Weight], pack: Callable[..., np.ndarray]) -> Source:
    """How a parameter that holds `weights` comes out of a checkpoint: `pack` gets the bytes of each, in order."""

    def pack_tensors(*tensors: np.ndarray) -> np.ndarray:
        left = iter(tensors)
        return pack(*(w.raw(*islice(left, len(w.tensors))) for w in weights))

    return Source(tuple((name, w.codec) for w in weights for name, _ in w.tensors), pack_tensors)


class ModelModule(Module):
    """A module of layer operations. `codecs` gives the stored codec of a checkpoint tensor by name.

    `weights` are the checkpoint's tensors and the tables that the module calls for, by name.
    """

    def __init__(self, name: str, codecs: Callable[[str], str]) -> None:
        super().__init__(name)
        self.codecs = codecs
        self.weights: dict[str, Weight] = {}

    @contextmanager
    def step(self, role: str, width: int, states: Sequence[State], context: int) -> Iterator[Step]:
        """Build the function of that role for calls of `width` tokens, over `states` of a context of so many positions."""
        sequences = width if role == "batch" else 1
        types = {**token_inputs(role, width), **{s.name: s.type(sequences) for s in states}}
        inputs = {name: Value(type_, name) for name, type_ in types.items()}
        function = Function(function_name(role, width), list(inputs.values()), role=role, width=width, states=tuple(states))
        carried = {s.name: inputs.pop(s.name) for s in states}
        tokens, start, *length = inputs.values()
        function.length = length[0] if length else None
        with self.defining(function):
            tokens = ops.reshape(tokens, (width,))
            yield Step(self, role, tokens, start, function.length, carried, {s.name: s for s in states}, context)

    def weight(self, weight: Weight) -> Value:
        """The value of a weight in the function being built; one node a use."""
        for name, shape in weight.tensors or ((weight.name, weight.shape),):
            known = self.weights.setdefault(name, weight if name == weight.name else Weight(name, shape, weight.codec))
            if known.shape != shape:
                raise EmitError(f"weight {name} has shape {known.shape} in one place and {shape} in another")
        known = self.weights.get(weight.name, weight)
        return append("weight", (), (TensorType(weight.shape, F32),), {"weight": known})[0]


@dataclass(eq=False)
class Step:
    """One call of a model's function: its tokens [T], where they stand, and the states that it carries on.

    role: the function's, a key of `states.ROLES`. start: the first token's position, i32; in a batch the positions of
    T tokens of as many sequences, i32 [T], negative for a sequence that is left alone. length: how many tokens are real
    (None: all). states: by name, replaced as the model carries them on; in a batch each holds the layers of one sequence
    after another. kept: what each is in one sequence. hidden: what `layers.lm_head` was given, the rows of the last layer's
    norm.
    """

    module: ModelModule
    role: str
    tokens: Value
    start: Value
    length: Value | None
    states: dict[str, Value]
    kept: Mapping[str, State]
    context: int
    hidden: Value | None = None

    @property
    def mode(self) -> str:
        """How its tokens stand in the states: that of its role, where embed and encode are prefills."""
        return "prefill" if self.role in ("embed", "encode") else self.role

    @property
    def sequences(self) -> int:
        """How many sequences the states hold."""
        return self.tokens.shape[0] if self.mode == "batch" else 1

    def cache_of(self, layer: int) -> tuple[tuple[str, str], int]:
        """The states that have a layer's keys and values, and its number in them."""
        for ending in (SLIDING, ""):
            layers = self.kept[f"k{ending}"].layers if f"k{ending}" in self.kept else ()
            if layer in layers:
                return (f"k{ending}", f"v{ending}"), layers.index(layer)
        return ("k", "v"), layer

    def weight(self, name: str, shape: Sequence[int], codec: str | None = None, transform=None) -> Value:
        """The checkpoint tensor `<module path>.<name>`; `codec` overrides the stored one."""
        full = ".".join(filter(None, (current_path(), name)))
        return self.module.weight(Weight(full, tuple(shape), codec or self.module.codecs(full), transform))

    def vector(self, name: str, shape: Sequence[int], transform=None) -> Value:
        """A small tensor (norm weight, bias), stored in f32."""
        return self.weight(name, shape, "f32", transform)

    def stack(self, name: str, parts: Sequence[str], shape: Sequence[int]) -> Value:
        """Tensors `<module path>.<part>` of one shape [..., in], their rows under one another: [len(parts) * ..., in].

        Tensors of different codecs are held in f32, and so are vectors.
        """
        path = current_path()
        names = [f"{path}.{part}" for part in parts]
        codecs = {self.module.codecs(n) for n in names} if len(shape) > 1 else {"f32"}
        rows = len(parts) * (shape[0] if len(shape) > 1 else 1)
        codec = codecs.pop() if len(codecs) == 1 else "f32"
        whole = Weight(f"{path}.{name}", (rows, shape[-1]), codec, parts=tuple((n, tuple(shape)) for n in names))
        return self.module.weight(whole)

    def table(self, name: str, shape: Sequence[int], values: Callable[[], np.ndarray]) -> Value:
        """An f32 table computed from the config."""
        return self.module.weight(Weight(name, tuple(shape), values=values))
