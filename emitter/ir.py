"""The typed SSA graph: values, operations, functions, modules, and the scopes that name where in a model one stands.

Operations are appended to the function being built (`with module.function(...)`) under the current module path
(`with scope("layers.3")`). Nothing is a string until `castiron.emitter.printer` prints it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from castiron.emitter.states import State
from castiron.emitter.types import EmitError, TensorType


@dataclass(eq=False, slots=True)
class Value:
    """One SSA value: an input of a function (`name` set) or a result of an operation."""

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
    """An operation: kind (`add`, `dot_general`, `kernel`, ...), operands, results, attributes and module path."""

    kind: str
    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    attrs: Mapping[str, Any]
    path: str


@dataclass(frozen=True, eq=False)
class Source:
    """How a parameter's bytes come out of a checkpoint.

    tensors: (checkpoint tensor name, codec it is wanted in) pairs.
    pack: takes one raw uint8 array `[*shape[:-1], row_bytes]` per tensor, in order; returns the array to store.
    """

    tensors: tuple[tuple[str, str], ...]
    pack: Callable[..., np.ndarray]


@dataclass(frozen=True, eq=False)
class Param:
    """A weight or table that the module reads: one entry of the packed weights."""

    name: str
    type: TensorType
    source: Source


@dataclass(eq=False)
class Function:
    """A function: named inputs, operations in order, outputs.

    `storage[i]` is the input whose buffer output i lives in (a state updated in place), where it has one. A function of a
    model has a role (a key of `states.ROLES`), the number of tokens that a call takes, the states that it carries on, and
    the input that says how many tokens are real, if not all need be.
    """

    name: str
    inputs: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    outputs: tuple[Value, ...] = ()
    output_names: tuple[str, ...] = ()
    storage: dict[int, Value] = field(default_factory=dict)
    role: str = ""
    width: int = 1
    states: tuple[State, ...] = ()
    length: Value | None = None

    def returns(self, storage: Mapping[int, Value] = MappingProxyType({}), **outputs: Value) -> None:
        """Name and set the outputs; `storage` maps an output's index to the input it is updated in."""
        self.outputs = tuple(outputs.values())
        self.output_names = tuple(outputs)
        self.storage = dict(storage)


class Module:
    """Functions and the parameters they share."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.functions: dict[str, Function] = {}
        self.params: dict[str, Param] = {}

    @contextmanager
    def function(self, name: str, **inputs: TensorType) -> Iterator[tuple[Value, ...]]:
        """Build a function: yields its input values; operations made inside are appended to it."""
        function = Function(name, [Value(type_, input_name) for input_name, type_ in inputs.items()])
        with self.defining(function):
            yield tuple(function.inputs)

    @contextmanager
    def defining(self, function: Function) -> Iterator[None]:
        """Operations made inside are appended to `function`, which is the module's at the end."""
        if function.name in self.functions:
            raise EmitError(f"module {self.name}: function {function.name!r} is defined twice; give one of them another name")
        with building(self, function):
            yield
        if not function.outputs:
            raise EmitError(f"function {function.name!r} returns nothing; call returns(...) before its end")
        self.functions[function.name] = function

    def add_param(self, param: Param) -> None:
        """Register a parameter; the same name must always mean the same type."""
        known = self.params.setdefault(param.name, param)
        if known.type != param.type:
            raise EmitError(f"parameter {param.name!r} is {known.type} in one place and {param.type} in another")


@dataclass(slots=True)
class _Building:
    module: Module
    function: Function
    path: list[str]
    params: dict[str, Value]


_stack: list[_Building] = []


@contextmanager
def building(module: Module, function: Function) -> Iterator[None]:
    """Append to `function` inside; restores the function built before, also on error."""
    _stack.append(_Building(module, function, [], {}))
    try:
        yield
    finally:
        _stack.pop()


def _top() -> _Building:
    if not _stack:
        raise EmitError("no function is being built; make operations inside `with module.function(...)`")
    return _stack[-1]


def current_function() -> Function:
    """The function that is being built."""
    return _top().function


@contextmanager
def scope(name: str) -> Iterator[None]:
    """Operations made inside carry `name` at the end of their module path."""
    path = _top().path
    path.append(name)
    try:
        yield
    finally:
        path.pop()


def current_path() -> str:
    """The module path of the operation made next, such as `layers.3.self_attn`."""
    return ".".join(_stack[-1].path) if _stack else ""


def fail(kind: str, message: str, operands: Sequence[Value] = ()) -> EmitError:
    """The error of an operation: its kind, its operands with their types, and the module path."""
    args = ", ".join(f"{v.name + ': ' if v.name else ''}{v.type}" for v in operands)
    path = current_path()
    return EmitError(f"{kind}({args}){' in ' + path if path else ''}: {message}")


def append(
    kind: str, operands: Sequence[Value], results: Sequence[TensorType], attrs: Mapping[str, Any] | None = None
) -> tuple[Value, ...]:
    """Append an operation whose result types the caller has inferred."""
    for operand in operands:
        if not isinstance(operand, Value):
            raise fail(kind, f"an operand is {type(operand).__name__}, not a value of the graph")
    values = tuple(Value(type_) for type_ in results)
    _top().function.ops.append(Op(kind, tuple(operands), values, dict(attrs or {}), current_path()))
    return values


def parameter(param: Param) -> Value:
    """The value of a module parameter in the function being built (read once a function)."""
    top = _top()
    top.module.add_param(param)
    if param.name not in top.params:
        (top.params[param.name],) = append("parameter", (), (param.type,), {"name": param.name})
    return top.params[param.name]


def users(function: Function) -> dict[Value, int]:
    """How often each value is used, outputs included."""
    counts: dict[Value, int] = {}
    for value in [v for op in function.ops for v in op.operands] + list(function.outputs):
        counts[value] = counts.get(value, 0) + 1
    return counts
