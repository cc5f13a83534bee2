"""An independent check of a finished graph: it shares no code with the functions that build it.

`check(module, table)` raises one EmitError that names the function, the operation and the module path, or returns nothing.
A table says which operations there may be: `LOWERED` here, `layer_rules.LAYERS` before lowering.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from castiron.emitter.ir import Function, Module, Op
from castiron.emitter.ops import ARITHMETIC, BITWISE, COMPARISONS, FLOAT_UNARY
from castiron.emitter.types import BF16, DTYPES, F32, I1, I32, EmitError, TensorType


@dataclass(frozen=True)
class Rule:
    """How many operands and results a kind of operation has (None where that varies), and what is wrong with one, in words,
    or None."""

    operands: int | None
    results: int | None
    problem: Callable[[Op], str | None]


def check(module: Module, table: Mapping[str, Rule]) -> None:
    """Check definitions, types, unused inputs and parameters, element types and names of the whole module."""
    if not module.functions:
        raise EmitError(f"module {module.name} has no function")
    read: set[str] = set()
    for function in module.functions.values():
        _check_function(module, function, table, read)
    unread = sorted(set(module.params) - read)
    if unread:
        raise EmitError(f"module {module.name}: no function reads parameter {', '.join(unread)}")


def _check_function(module: Module, function: Function, table: Mapping[str, Rule], read: set[str]) -> None:
    defined = set()
    used = set()

    def wrong(op: Op | None, message: str) -> EmitError:
        where = f"{op.kind} in {op.path or 'no scope'}" if op else "its signature"
        return EmitError(f"function {function.name}, {where}: {message}")

    def define(value, op) -> None:
        if value in defined:
            raise wrong(op, "a value is defined twice")
        # bool(value.dtype) would accept an unknown type, so it is looked up: f64 has no entry.
        if not isinstance(value.type, TensorType) or DTYPES.get(value.type.dtype.name) is not value.type.dtype:
            raise wrong(op, f"{value.type} is of no known element type")
        defined.add(value)

    names = [v.name for v in function.inputs]
    if len(set(names)) != len(names) or not all(names):
        raise wrong(None, "inputs need distinct names")
    for name in names:
        # `arg_0` and `index_0` are the printer's own; a name that begins with an underscore may be.
        if not re.fullmatch(r"[A-Za-z]\w*", name) or re.fullmatch(r"(arg|index)_\d+", name):
            raise wrong(None, f"{name!r} cannot name an input")
    for value in function.inputs:
        define(value, None)
    for op in function.ops:
        for operand in op.operands:
            if operand not in defined:
                raise wrong(op, "an operand is used before it is defined")
            used.add(operand)
        for result in op.results:
            define(result, op)
        rule = table.get(op.kind)
        if rule is None:
            raise wrong(op, "no such operation in a graph of this form")
        problem = _miscounted(rule, op) or _guarded(rule, op)
        if problem:
            types = ", ".join(str(v.type) for v in op.operands)
            raise wrong(op, f"{problem}; operands ({types}), results ({', '.join(str(v.type) for v in op.results)})")
        if op.kind == "parameter":
            param = module.params.get(op.attrs["name"])
            if param is None or param.type != op.results[0].type:
                raise wrong(op, f"parameter {op.attrs['name']!r} is not declared with this type")
            read.add(param.name)
    if not function.outputs or len(function.outputs) != len(set(function.output_names)):
        raise wrong(None, "outputs are needed, each with its own name")
    for value in function.outputs:
        if value not in defined:
            raise wrong(None, "an output is not defined")
        used.add(value)
    for value in function.inputs:
        # What a model's function takes is fixed by its role; a recurrent model may have no use for a position.
        if value not in used and not function.role:
            raise wrong(None, f"input {value.name!r} is never used")
    for index, value in function.storage.items():
        known = value in function.inputs and 0 <= index < len(function.outputs)
        if not known or value.type != function.outputs[index].type:
            raise wrong(None, f"output {index} cannot live in the storage of {value.name!r}")
    if len(set(function.storage.values())) != len(function.storage):
        raise wrong(None, "two outputs cannot live in the storage of one input")


def _miscounted(rule: Rule, op: Op) -> str | None:
    if rule.operands is not None and len(op.operands) != rule.operands:
        return f"takes {rule.operands} operands"
    return f"has {rule.results} results" if rule.results is not None and len(op.results) != rule.results else None


def _guarded(rule: Rule, op: Op) -> str | None:
    """What the rule says; a graph so broken that the rule trips over it is wrong too."""
    try:
        return rule.problem(op)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        return f"malformed attributes or shapes ({error!r})"


def _moves(rule: Callable[[Op], str | None]) -> Callable[[Op], str | None]:
    """For operations that move elements and leave them as they are."""

    def with_dtype(op: Op) -> str | None:
        return "the element type changes" if op.operands[0].dtype is not op.results[0].dtype else rule(op)

    return with_dtype


def _distinct(dims, rank: int) -> bool:
    return len(set(dims)) == len(dims) and all(0 <= d < rank for d in dims)


def shapes_of(op: Op) -> tuple[tuple[int, ...], ...]:
    return tuple(v.shape for v in (*op.operands, op.results[0]))


def _elementwise(dtypes: Callable[[str], bool]) -> Callable[[Op], str | None]:
    def rule(op: Op) -> str | None:
        if len({v.type for v in (*op.operands, *op.results)}) != 1:
            return "operands and result must have one type"
        return None if dtypes(op.results[0].dtype.kind) else "not defined for this element type"

    return rule


def _constant(op: Op) -> str | None:
    value, type_ = op.attrs["value"], op.results[0].type
    if value.dtype != type_.dtype.numpy:
        return f"the array is {value.dtype}, not as {type_.dtype} is stored"
    return None if value.shape in ((), type_.shape) else "the array has another shape"


def _iota(op: Op) -> str | None:
    if op.results[0].dtype in (BF16, I1):
        return "not defined for this element type"
    return None if 0 <= op.attrs["dim"] < op.results[0].type.rank else "no such dimension"


def _compare(op: Op) -> str | None:
    a, b = op.operands
    if op.attrs["direction"] not in COMPARISONS:
        return f"no direction {op.attrs['direction']!r}"
    return None if a.type == b.type and op.results[0].type == TensorType(a.shape, I1) else "types disagree"


def _select(op: Op) -> str | None:
    pred, a, b = op.operands
    ok = a.type == b.type == op.results[0].type and pred.type == TensorType(a.shape, I1)
    return None if ok else "types disagree"


def _convert(op: Op) -> str | None:
    if op.results[0].dtype is BF16 and op.operands[0].dtype.kind != "float":
        return "integers do not convert to bf16"
    return None if op.operands[0].shape == op.results[0].shape else "shapes differ"


def _bitcast(op: Op) -> str | None:
    x, y = op.operands[0], op.results[0]
    narrow, wide = sorted((x, y), key=lambda v: v.dtype.bits)
    ratio = wide.dtype.bits // narrow.dtype.bits
    ok = I1 not in (x.dtype, y.dtype) and narrow.shape == wide.shape + ((ratio,) if ratio > 1 else ())
    return None if ok else "the bits of the operand are not those of the result"


def _broadcast(op: Op) -> str | None:
    (shape, result), dims = shapes_of(op), op.attrs["dims"]
    ok = len(dims) == len(shape) and sorted(dims) == list(dims) and _distinct(dims, len(result))
    ok = ok and all(n in (1, result[d]) for n, d in zip(shape, dims))
    return None if ok else f"dims {dims} do not fit"


def _reshape(op: Op) -> str | None:
    return None if prod(op.operands[0].shape) == prod(op.results[0].shape) else "element counts differ"


def _transpose(op: Op) -> str | None:
    (shape, result), dims = shapes_of(op), op.attrs["dims"]
    ok = len(dims) == len(shape) and _distinct(dims, len(shape)) and tuple(shape[d] for d in dims) == result
    return None if ok else f"dims {dims} do not fit"


def _slice(op: Op) -> str | None:
    (shape, result), starts = shapes_of(op), op.attrs["starts"]
    ok = len(shape) == len(result) == len(starts) and all(s >= 0 and s + r <= n for s, r, n in zip(starts, result, shape))
    return None if ok else "the window leaves the operand"


def _dynamic(op: Op) -> str | None:
    update = op.kind == "dynamic_update_slice"
    shape, window = op.operands[0].shape, (op.operands[1] if update else op.results[0]).shape
    starts = op.operands[2 if update else 1 :]
    if len(starts) != len(shape) or any(v.type != TensorType((), I32) for v in starts):
        return "one i32 start index a dimension is needed"
    if update and (op.results[0].type != op.operands[0].type or op.operands[1].dtype is not op.results[0].dtype):
        return "the result and the update must have the operand's type"
    if not update and tuple(op.attrs["sizes"]) != window:
        return "the result is not of the window's shape"
    return None if len(window) == len(shape) and all(w <= n for w, n in zip(window, shape)) else "the window is larger"


def _concatenate(op: Op) -> str | None:
    dim, shapes = op.attrs["dim"], [v.shape for v in op.operands]
    if len({v.dtype for v in op.operands}) != 1 or not 0 <= dim < len(shapes[0]):
        return "element types differ or there is no such dimension"
    result = list(shapes[0])
    result[dim] = sum(s[dim] for s in shapes)
    others = {s[:dim] + s[dim + 1 :] for s in shapes}
    return None if len(others) == 1 and tuple(result) == op.results[0].shape else "extents do not add up"


def _dot(op: Op) -> str | None:
    (a, b, result), (ca, cb), (ba, bb) = shapes_of(op), op.attrs["contract"], op.attrs["batch"]
    if len({v.dtype for v in (*op.operands, *op.results)}) != 1:
        return "element types differ"
    if not (_distinct(ca + ba, len(a)) and _distinct(cb + bb, len(b)) and len(ca) == len(cb)):
        return "contracting and batching dimensions must be distinct ones of the operands"
    if [a[i] for i in ca + ba] != [b[i] for i in cb + bb]:
        return "contracted or batched extents differ"
    free = [n for i, n in enumerate(a) if i not in ca + ba] + [n for i, n in enumerate(b) if i not in cb + bb]
    return None if tuple([a[i] for i in ba] + free) == result else "the result has another shape"


def _reduce(op: Op) -> str | None:
    x, dims = op.operands[0], op.attrs["dims"]
    known = op.attrs["reducer"] in ("add", "maximum") and op.attrs["exact"] in (False, True)
    if x.dtype.kind != "float" or not known or not _distinct(dims, x.type.rank):
        return "only sums and maxima of floats, over dimensions of the operand"
    left = TensorType(tuple(n for i, n in enumerate(x.shape) if i not in dims), x.dtype)
    ok = op.results[0].type == left and op.operands[1].type == TensorType((), x.dtype)
    return None if ok else "the result or the initial value has another type"


def _argmax(op: Op) -> str | None:
    n = op.operands[0].shape
    want = [TensorType(n, F32), TensorType(n, I32), TensorType((), F32), TensorType((), I32)]
    ok = [v.type for v in op.operands] == want and [v.type for v in op.results] == want[2:]
    return None if ok and len(n) == 1 else "needs f32 and i32 vectors"


def _gather(op: Op) -> str | None:
    (table, ids, result) = shapes_of(op)
    ok = len(table) == 2 and len(ids) == 1 and op.operands[1].dtype is I32
    return None if ok and result == (*ids, table[1]) else "the result has another shape"


def _kernel(op: Op) -> str | None:
    kernel = op.attrs["kernel"]
    operands, results = ([v.type for v in values] for values in (op.operands, op.results))
    if operands != list(kernel.tensors.values()) or results != list(kernel.results.values()):
        return "operands or results are not the kernel's"
    return None if list(op.attrs["indices"]) == kernel.indices else "an index operand is missing"


STABLEHLO: dict[str, Rule] = {
    **dict.fromkeys(FLOAT_UNARY, Rule(1, 1, _elementwise(lambda kind: kind == "float"))),
    **dict.fromkeys(ARITHMETIC, Rule(2, 1, _elementwise(lambda kind: kind != "bool"))),
    **dict.fromkeys(BITWISE, Rule(2, 1, _elementwise(lambda kind: kind != "float"))),
    **dict.fromkeys(("dynamic_slice", "dynamic_update_slice"), Rule(None, 1, _moves(_dynamic))),
    "constant": Rule(0, 1, _constant),
    "iota": Rule(0, 1, _iota),
    "compare": Rule(2, 1, _compare),
    "select": Rule(3, 1, _select),
    "convert": Rule(1, 1, _convert),
    "bitcast_convert": Rule(1, 1, _bitcast),
    "broadcast_in_dim": Rule(1, 1, _moves(_broadcast)),
    "reshape": Rule(1, 1, _moves(_reshape)),
    "transpose": Rule(1, 1, _moves(_transpose)),
    "slice": Rule(1, 1, _moves(_slice)),
    "concatenate": Rule(None, 1, _moves(_concatenate)),
    "dot_general": Rule(2, 1, _dot),
    "reduce": Rule(2, 1, _reduce),
    "argmax": Rule(4, 2, _argmax),
    "gather": Rule(2, 1, _moves(_gather)),
}

LOWERED: dict[str, Rule] = {
    **STABLEHLO,
    "parameter": Rule(0, 1, lambda op: None),
    "kernel": Rule(None, None, _kernel),
}
