"""The typed SSA graph: values, operations, functions and modules.

Operations are appended to the function being built (`with module.function(...)`), with the path of
their layer, such as `layers.3.self_attn`, which `scope` sets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from castiron.emitter.abi import Function, State
from castiron.emitter.graph.types import EmitError, TensorType


@dataclass(eq=False, slots=True)
class Value:
    """One SSA value: an input of a function, which has a `name`, or a result of an operation."""

    type: TensorType
    name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self):
        return self.type.dtype


@dataclass(eq=False, slots=True)
class Op:
    """An operation, such as `add` or `kernel`, in the layer `path` of the model."""

    kind: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Any]
    path: str


@dataclass(frozen=True, eq=False)
class Source:
    """How to make the bytes of a parameter.

    tensors: (name, codec) of each checkpoint tensor that is read.
    pack: gets the rows of each tensor in that codec, u8 [..., row_bytes]; returns the stored array.
    """

    tensors: tuple[tuple[str, str], ...]
    pack: Callable[..., np.ndarray]


@dataclass(frozen=True, eq=False)
class Param:
    """A weight or table that the module reads: one entry of the weights file."""

    name: str
    type: TensorType
    source: Source


@dataclass(eq=False)
class Graph:
    """The graph of a function: named inputs, operations in order, outputs.

    storage: from the index of an output to the input whose buffer this output overwrites.
    entry, states: for an exported function, its role and width, and the states that it updates.
    length: the input with the number of tokens that are not padding; None without padding.
    """

    name: str
    inputs: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: tuple[Value, ...] = ()
    output_names: tuple[str, ...] = ()
    storage: dict[int, Value] = field(default_factory=dict)
    entry: Function | None = None
    states: tuple[State, ...] = ()
    length: Value | None = None

    def returns(self, storage: Mapping[int, Value] = MappingProxyType({}), **outputs: Value) -> None:
        """Set the outputs by name; `storage` is that of the class."""
        self.outputs = tuple(outputs.values())
        self.output_names = tuple(outputs)
        self.storage = dict(storage)


class Module:
    """A set of functions and the parameters that they share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.functions: dict[str, Graph] = {}
        self.params: dict[str, Param] = {}

    @contextmanager
    def function(self, name: str, **inputs: TensorType) -> Iterator[tuple[Value, ...]]:
        """Add a function made in a `with` block, which yields the inputs as values."""
        function = Graph(name, [Value(type_, input_name) for input_name, type_ in inputs.items()])
        with self.defining(function):
            yield tuple(function.inputs)

    @contextmanager
    def defining(self, function: Graph) -> Iterator[None]:
        """Append the operations of a `with` block to `function`, then add it to the module."""
        if function.name in self.functions:
            raise EmitError(f"module {self.name}: two functions are named {function.name!r}; rename one function")
        with building(self, function):
            yield
        if not function.outputs:
            raise EmitError(f"function {function.name!r} has no outputs; call returns(...) before the function ends")
        self.functions[function.name] = function

    def part(self, *names: str) -> Module:
        """Return a module with only the functions `names` and the parameters that they read."""
        part = Module(self.name)
        part.functions = {name: self.functions[name] for name in names}
        read = {op.attrs["name"] for f in part.functions.values() for op in f.ops if op.kind == "parameter"}
        part.params = {name: param for name, param in self.params.items() if name in read}
        return part

    def add_param(self, param: Param) -> None:
        """Register a parameter; raise EmitError if its name is registered with another type."""
        known = self.params.setdefault(param.name, param)
        if known.type != param.type:
            raise EmitError(f"parameter {param.name!r} is used with two types: {known.type} and {param.type}; rename one use")


@dataclass(slots=True)
class _Building:
    module: Module
    function: Graph
    path: list[str]
    params: dict[str, Value]


_stack: list[_Building] = []


@contextmanager
def building(module: Module, function: Graph) -> Iterator[None]:
    """Append the operations made in a `with` block to `function`, without adding it to `module`."""
    _stack.append(_Building(module, function, [], {}))
    try:
        yield
    finally:
        _stack.pop()


def _top() -> _Building:
    if not _stack:
        raise EmitError("no function is being built; make operations inside `with module.function(...)`")
    return _stack[-1]


def current_function() -> Graph:
    return _top().function


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Append `name` to the path of all operations made in a `with` block."""
    path = _top().path
    path.append(name)
    try:
        yield
    finally:
        path.pop()


def current_path() -> str:
    """Return the path that `scope` has set for new operations, such as `layers.3.self_attn`."""
    return ".".join(_stack[-1].path) if _stack else ""


def fail(kind: str, message: str, operands: Sequence[Value] = ()) -> EmitError:
    """Return an EmitError with `message`, and the kind, operands and path of an operation."""
    args = ", ".join(f"{v.name + ': ' if v.name else ''}{v.type}" for v in operands)
    path = current_path()
    return EmitError(f"{kind}({args}){' in ' + path if path else ''}: {message}")


def append(
    kind: str, operands: Sequence[Value], results: Sequence[TensorType], attrs: Mapping[str, Any] | None = None
) -> tuple[Value, ...]:
    """Append an operation to the function being built, unchecked; return its results."""
    for operand in operands:
        if not isinstance(operand, Value):
            raise fail(kind, f"operand is not a Value of the graph: {type(operand).__name__}; pass a Value")
    values = tuple(Value(type_) for type_ in results)
    _top().function.ops.append(Op(kind, tuple(operands), values, dict(attrs or {}), current_path()))
    return values


def parameter(param: Param) -> Value:
    """Return the value of `param` in the function being built, reading it once."""
    top = _top()
    top.module.add_param(param)
    if param.name not in top.params:
        (top.params[param.name],) = append("parameter", (), (param.type,), {"name": param.name})
    return top.params[param.name]


def users(function: Graph) -> dict[Value, int]:
    """Count the uses of each value of `function`, as an operand or as an output."""
    counts: dict[Value, int] = {}
    for value in [v for op in function.ops for v in op.operands] + list(function.outputs):
        counts[value] = counts.get(value, 0) + 1
    return counts
