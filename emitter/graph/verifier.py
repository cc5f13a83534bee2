"""The verifier of a module: it checks definitions, uses, types, names and operations."""

from __future__ import annotations

import re

from castiron.emitter.graph.ir import Graph, Module, Op
from castiron.emitter.graph.stablehlo import Table
from castiron.emitter.graph.types import DTYPES, EmitError, TensorType


def check(module: Module, table: Table) -> None:
    """Raise EmitError with the first problem of a module.

    table: the allowed operations: `LAYERS` before lowering, `LOWERED` after it.
    """
    if not module.functions:
        raise EmitError(f"module {module.name} has no function; add one")
    read: set[str] = set()
    for function in module.functions.values():
        _check_function(module, function, table, read)
    unread = sorted(set(module.params) - read)
    if unread:
        raise EmitError(f"module {module.name}: no function reads parameter {', '.join(unread)}; remove it")


def _check_function(module: Module, function: Graph, table: Table, read: set[str]) -> None:
    defined = set()
    # An input is used if an operation reads it, or if an output overwrites it.
    used = set(function.storage.values())

    def wrong(op: Op | None, message: str) -> EmitError:
        where = f"{op.kind} in {op.path or 'no scope'}" if op else "its signature"
        return EmitError(f"function {function.name}, {where}: {message}")

    def define(value, op) -> None:
        if value in defined:
            raise wrong(op, f"the value {value.name or value.type} is defined twice; define it once")
        # Looked up in the table, so that an unknown type such as f64 is an error.
        if not isinstance(value.type, TensorType) or DTYPES.get(value.type.dtype.name) is not value.type.dtype:
            raise wrong(op, f"{value.type} has an unknown element type; use one of {', '.join(DTYPES)}")
        defined.add(value)

    names = [v.name for v in function.inputs]
    for index, name in enumerate(names):
        if not name:
            raise wrong(None, f"input {index} has no name; give it one")
        if name in names[:index]:
            raise wrong(None, f"two inputs have the name {name!r}; rename one")
        # The printer uses `arg_0` and `index_0`, and may use names that begin with an underscore.
        if not re.fullmatch(r"[A-Za-z]\w*", name) or re.fullmatch(r"(arg|index)_\d+", name):
            raise wrong(None, f"invalid input name: {name!r}; use letters, digits and _, but not arg_N or index_N")
    for value in function.inputs:
        define(value, None)
    for op in function.ops:
        for index, operand in enumerate(op.operands):
            if operand not in defined:
                raise wrong(
                    op, f"operand {index} ({operand.type}) is no input or earlier result of this function; define it first"
                )
            used.add(operand)
        for result in op.results:
            define(result, op)
        operation = table.get(op.kind)
        if operation is None:
            raise wrong(op, "unknown operation for this stage of lowering")
        problem = operation.check(op)
        if problem:
            types = ", ".join(str(v.type) for v in op.operands)
            raise wrong(op, f"{problem}; operands ({types}), results ({', '.join(str(v.type) for v in op.results)})")
        if op.kind == "parameter":
            param = module.params.get(op.attrs["name"])
            if param is None:
                raise wrong(op, f"parameter {op.attrs['name']!r} is not declared; declare it")
            if param.type != op.results[0].type:
                raise wrong(op, f"parameter {param.name!r} is declared as {param.type}, not {op.results[0].type}")
            read.add(param.name)
    if not function.outputs:
        raise wrong(None, "it has no outputs; return at least one value")
    if len(function.outputs) != len(set(function.output_names)):
        listed = ", ".join(function.output_names)
        raise wrong(None, f"{len(function.outputs)} outputs have the names {listed}; give each output its own name")
    for index, value in enumerate(function.outputs):
        if value not in defined:
            raise wrong(None, f"output {index} ({value.type}) is no input or result of this function")
        used.add(value)
    for value in function.inputs:
        # A role fixes the inputs of a model's function; a recurrent model may not use the position.
        if value not in used and not function.entry:
            raise wrong(None, f"input {value.name!r} is never used; remove it")
    for index, value in function.storage.items():
        known = value in function.inputs and 0 <= index < len(function.outputs)
        if not known or value.type != function.outputs[index].type:
            raise wrong(None, f"output {index} cannot reuse the buffer of {value.name!r}")
    if len(set(function.storage.values())) != len(function.storage):
        raise wrong(None, "two outputs reuse the buffer of one input; give each output its own buffer")
