"""The verifier reports each kind of damage to a graph."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Graph, Module, Op, Param, Source, Value
from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.stablehlo import LOWERED
from castiron.emitter.graph.types import BF16, DTYPES, F32, I1, I32, DType, EmitError, TensorType
from castiron.emitter.graph.verifier import check
from castiron.reference.xla import run_stablehlo
from tests.emitter.cases import Case, all_cases, module_of
from tests.emitter.small import CACHE, small_module

KINDS = sorted({case.kind for case in all_cases()})


def damaged(damage: Callable[[Module, Graph], None], with_kernel: bool = True) -> Module:
    module = small_module(with_kernel)
    damage(module, module.functions["step"])
    return module


def op_of(function: Graph, kind: str) -> Op:
    return next(op for op in function.ops if op.kind == kind)


def first_case(kind: str) -> tuple[Module, Op]:
    """Return a module with one generated use of the operation, and that operation."""
    case = next(c for c in all_cases() if c.kind == kind and (kind != "select" or c.inputs[1][0].dtype is not I1))
    module = module_of([case])
    return module, op_of(module.functions["case_0"], kind)


def retype(op: Op, type_: TensorType, index: int = 0) -> None:
    op.results[index].type = type_


def test_accepts_complete_graphs():
    check(module_of(all_cases()), LOWERED)
    check(small_module(True), LOWERED)
    check(small_module(False), LOWERED)


def wrong_shapes(op: Op) -> list[tuple[int, ...]]:
    shape = op.results[0].shape
    if op.kind == "broadcast_in_dim":
        return [op.operands[0].shape[:-1], tuple(n + 1 for n in shape[:-1])]
    if op.kind == "iota" or (op.kind == "constant" and op.attrs["value"].shape == ()):
        # A splat and an iota have any shape.
        return []
    return [(*shape, 2), (3, *shape), (*shape[:-1], shape[-1] + 9) if shape else (7,)]


def wrong_dtypes(op: Op) -> list[DType]:
    others = [d for d in DTYPES.values() if d is not op.results[0].dtype]
    if op.kind == "bitcast_convert":
        return [d for d in others if d is I1 or d.bits != op.results[0].dtype.bits]
    # Every element type is valid for a conversion.
    return {"convert": [], "iota": [BF16, I1]}.get(op.kind, others)


@pytest.mark.parametrize("kind", KINDS)
def test_rejects_a_result_of_a_wrong_type(kind):
    """The operation's own check reports it, because no other operation reads the result."""
    module, op = first_case(kind)
    known = op.results[0].type
    wrong = [TensorType(shape, known.dtype) for shape in wrong_shapes(op)]
    for type_ in wrong + [TensorType(known.shape, dtype) for dtype in wrong_dtypes(op)]:
        retype(op, type_)
        with pytest.raises(EmitError, match=rf"function case_0, {kind} in {kind}: "):
            check(module, LOWERED)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("constant", "iota")])
def test_rejects_an_operand_with_a_wrong_type(kind):
    module, op = first_case(kind)
    function = module.functions["case_0"]
    operand = op.operands[-1]
    wrong = [TensorType((*operand.shape, 2), operand.dtype), TensorType((3, 3, 3, 3, 3), I1)]
    for type_ in wrong:
        stray = Value(type_, "stray")
        function.inputs.append(stray)
        op.operands = (*op.operands[:-1], stray)
        with pytest.raises(EmitError, match=rf"function case_0, {kind} in {kind}: "):
            check(module, LOWERED)
        function.inputs.remove(stray)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("concatenate", "kernel")])
def test_rejects_too_few_and_too_many_operands(kind):
    module, op = first_case(kind)
    known = op.operands
    extra = Value(TensorType((), F32), "extra")
    for operands in (known[:-1], (*known, extra)):
        if operands == known:
            continue
        op.operands = operands
        module.functions["case_0"].inputs.append(extra)
        with pytest.raises(EmitError, match=kind):
            check(module, LOWERED)
        module.functions["case_0"].inputs.pop()


BAD_ATTRS = [
    ("broadcast_in_dim", "dims", (0, 1, 2, 3, 4)),
    ("transpose", "dims", (-1,)),
    ("slice", "starts", (-1,)),
    ("slice", "starts", (10**6,)),
    ("concatenate", "dim", 7),
    ("concatenate", "dim", -1),
    ("iota", "dim", -1),
    ("iota", "dim", 9),
    ("dot_general", "contract", ((0, 0), (0, 0))),
    ("dot_general", "contract", ((9,), (0,))),
    ("dot_general", "batch", ((-1,), (0,))),
    ("reduce", "dims", (17,)),
    ("reduce", "dims", (0, 0)),
    ("reduce", "reducer", "multiply"),
    ("compare", "direction", "<"),
    ("constant", "value", np.zeros((2, 2, 2), np.float64)),
]


@pytest.mark.parametrize("kind, name, value", BAD_ATTRS, ids=[f"{k}-{n}-{i}" for i, (k, n, _) in enumerate(BAD_ATTRS)])
def test_rejects_wrong_attributes(kind, name, value):
    module, op = first_case(kind)
    op.attrs[name] = value
    with pytest.raises(EmitError, match=rf"{kind} in {kind}: "):
        check(module, LOWERED)


@pytest.mark.parametrize("kind", [k for k in KINDS if first_case(k)[1].attrs])
def test_rejects_a_missing_attribute(kind):
    for name in first_case(kind)[1].attrs:
        module, op = first_case(kind)
        del op.attrs[name]
        with pytest.raises(EmitError, match=rf"{kind} in {kind}: malformed"):
            check(module, LOWERED)


def storage_twice(_module: Module, function: Graph) -> None:
    function.outputs = (*function.outputs, function.outputs[2])
    function.output_names = (*function.output_names, "copy")
    function.storage = {2: function.inputs[2], 3: function.inputs[2]}


def undefined_operand(_module: Module, function: Graph) -> None:
    op = op_of(function, "convert")
    op.operands = (Value(op.operands[0].type),)


def swapped_operands(_module: Module, function: Graph) -> None:
    op = op_of(function, "kernel")
    op.operands = (op.operands[1], op.operands[0], op.operands[2])


F64, FALSE_I32 = DType("f64", 64, "float", np.dtype(np.float64)), DType("i32", 64, "int", np.dtype(np.int64))
EMBED = "embed.weight"
SPARE = Param("spare", CACHE, Source((("spare", "f32"),), lambda raw: raw))
# What is done to a module and its function, and what the verifier reports.
DAMAGE: list[tuple[Callable[[Module, Graph], object], str]] = [
    (
        lambda m, f: f.ops.append(op_of(f, "convert")),
        "convert in model.embed_tokens: the value tensor<1x8xf32> is defined twice",
    ),
    (lambda m, f: setattr(op_of(f, "iota"), "results", (f.inputs[0],)), "iota in no scope: the value token is defined twice"),
    (lambda m, f: f.ops.reverse(), "is no input or earlier result of this function"),
    (lambda m, f: setattr(op_of(f, "convert"), "results", (Value(CACHE), Value(CACHE))), "has 2 results, needs 1"),
    (undefined_operand, "convert in model.embed_tokens: operand 0 (tensor<1x8xbf16>) is no input or earlier result"),
    (
        lambda m, f: setattr(f, "outputs", (*f.outputs[:2], Value(CACHE))),
        "function step, its signature: output 2 (tensor<2x6x8xf32>) is no input or result",
    ),
    (lambda m, f: f.inputs.append(Value(TensorType((), I32), "spare")), "input 'spare' is never used"),
    (lambda m, f: m.add_param(SPARE), "module small: no function reads parameter spare"),
    (lambda m, f: m.params.clear(), "parameter 'embed.weight' is not declared"),
    (
        lambda m, f: m.params.update({EMBED: Param(EMBED, CACHE, m.params[EMBED].source)}),
        "parameter 'embed.weight' is declared as ",
    ),
    (
        lambda m, f: retype(op_of(f, "reduce"), TensorType((8,), F64)),
        "reduce in model.layers.1: tensor<8xf64> has an unknown element type",
    ),
    (lambda m, f: setattr(f.inputs[0], "type", TensorType((), FALSE_I32)), "tensor<i32> has an unknown element type"),
    (lambda m, f: setattr(f, "storage", {1: f.inputs[2]}), "output 1 cannot reuse the buffer of 'cache'"),
    (lambda m, f: setattr(f, "storage", {7: f.inputs[2]}), "output 7 cannot reuse the buffer of 'cache'"),
    (lambda m, f: setattr(f, "storage", {2: f.outputs[2]}), "output 2 cannot reuse the buffer of ''"),
    (storage_twice, "two outputs reuse the buffer of one input"),
    (lambda m, f: setattr(f, "output_names", f.output_names[:1]), "outputs have the names"),
    (
        lambda m, f: setattr(f, "output_names", ("a", "b", "a")),
        "3 outputs have the names a, b, a; give each output its own name",
    ),
    (lambda m, f: f.returns(), "it has no outputs; return at least one value"),
    (lambda m, f: setattr(f.inputs[1], "name", f.inputs[0].name), "two inputs have the name"),
    (lambda m, f: setattr(op_of(f, "convert"), "kind", "rms_norm"), "rms_norm in model.embed_tokens: unknown operation"),
    (lambda m, f: m.functions.clear(), "module small has no function"),
    (swapped_operands, "the types of operands or results are not the kernel's"),
    (lambda m, f: retype(op_of(f, "kernel"), TensorType((1, 2), F32)), "the types of operands or results are not the kernel's"),
    (lambda m, f: op_of(f, "kernel").attrs.update(indices={}), "kernel in model.layers.1: an index operand is missing"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGE)
def test_reports_damage_to_a_graph(damage, words):
    with pytest.raises(EmitError) as error:
        check(damaged(damage), LOWERED)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "0", "a b", "_x", "arg_3", "index_0", "x-y", "é "])
def test_rejects_invalid_names_of_inputs(name):
    with pytest.raises(EmitError, match="name"):
        check(damaged(lambda module, function: setattr(function.inputs[0], "name", name)), LOWERED)


@pytest.mark.parametrize("name", ["value", "index", "xv", "keep", "token_2", "argmax"])
def test_any_other_name_differs_from_the_printers_own(name):
    """The region of argmax has names of its own."""
    module = module_of([Case("argmax", ((TensorType((3,), F32), np.zeros(3, np.float32)),), ops.argmax)])
    module.functions["case_0"].inputs[0].name = name
    check(module, LOWERED)
    assert run_stablehlo(print_module(module), "case_0", [np.float32([1, 3, 3])])[0] == 1
