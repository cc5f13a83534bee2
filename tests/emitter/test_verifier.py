"""The verifier against graphs that the builder would never make: each kind of damage is caught and named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from castiron.emitter import ops
from castiron.emitter.ir import Function, Module, Op, Param, Source, Value
from castiron.emitter.printer import print_module
from castiron.emitter.types import BF16, DTYPES, F32, I1, I32, DType, EmitError, TensorType
from castiron.emitter.verifier import LOWERED, check
from castiron.reference.xla import run_stablehlo
from tests.emitter.cases import Case, all_cases, module_of
from tests.emitter.small import CACHE, small_module

KINDS = sorted({case.kind for case in all_cases()})


def damaged(damage: Callable[[Module, Function], None], with_kernel: bool = True) -> Module:
    module = small_module(with_kernel)
    damage(module, module.functions["step"])
    return module


def op_of(function: Function, kind: str) -> Op:
    return next(op for op in function.ops if op.kind == kind)


def first_case(kind: str) -> tuple[Module, Op]:
    """A module of one generated use of the operation, and that operation."""
    case = next(c for c in all_cases() if c.kind == kind and (kind != "select" or c.inputs[1][0].dtype is not I1))
    module = module_of([case])
    return module, op_of(module.functions["case_0"], kind)


def retype(op: Op, type_: TensorType, index: int = 0) -> None:
    op.results[index].type = type_


def test_whole_graphs_pass():
    check(module_of(all_cases()), LOWERED)
    check(small_module(True), LOWERED)
    check(small_module(False), LOWERED)


def test_every_operation_has_a_rule():
    assert set(LOWERED) == {*KINDS, "parameter", "kernel"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_another_shape_is_caught(kind):
    module, op = first_case(kind)
    dtype, shape = op.results[0].dtype, op.results[0].shape
    wrong = [(*shape, 2), (3, *shape), (*shape[:-1], shape[-1] + 1) if shape else (7,)]
    if kind == "broadcast_in_dim":
        wrong = [op.operands[0].shape[:-1], tuple(n + 1 for n in shape[:-1])]
    if kind == "iota" or (kind == "constant" and op.attrs["value"].shape == ()):
        # A splat and a count are of whatever shape the result is.
        wrong = []
    for other in wrong:
        retype(op, TensorType(other, dtype))
        with pytest.raises(EmitError, match=rf"function case_0, {kind} in {kind}: "):
            check(module, LOWERED)


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_of_another_element_type_is_caught(kind):
    """By the rule of the operation itself: nothing reads the result but the function's return."""
    module, op = first_case(kind)
    known = op.results[0].dtype
    wrong = [d for d in DTYPES.values() if d is not known]
    if kind == "convert":
        # Any type is right, as long as the extents fit; bf16 comes from floats only.
        wrong = []
    if kind == "bitcast_convert":
        wrong = [d for d in wrong if d is I1 or d.bits != known.bits]
    if kind == "iota":
        wrong = [BF16, I1]
    for dtype in wrong:
        retype(op, TensorType(op.results[0].shape, dtype))
        with pytest.raises(EmitError, match=rf"function case_0, {kind} in {kind}: "):
            check(module, LOWERED)


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in ("constant", "iota")])
def test_an_operand_of_another_type_is_caught(kind):
    """One whose element type, or whose shape, is not what the operation was made for."""
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
def test_too_few_and_too_many_operands_are_caught(kind):
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_result_is_caught(kind):
    module, op = first_case(kind)
    op.results = (*op.results, Value(TensorType((), F32)))
    with pytest.raises(EmitError, match=rf"{kind} in {kind}: has \d results?"):
        check(module, LOWERED)


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
def test_bad_attributes_are_caught(kind, name, value):
    module, op = first_case(kind)
    op.attrs[name] = value
    with pytest.raises(EmitError, match=rf"{kind} in {kind}: "):
        check(module, LOWERED)


@pytest.mark.parametrize("kind", [k for k in KINDS if first_case(k)[1].attrs])
def test_a_missing_attribute_is_caught(kind):
    for name in first_case(kind)[1].attrs:
        module, op = first_case(kind)
        del op.attrs[name]
        with pytest.raises(EmitError, match=rf"{kind} in {kind}: malformed"):
            check(module, LOWERED)


def double_definition(_module, function):
    function.ops.append(op_of(function, "convert"))


def double_definition_of_an_input(_module, function):
    op_of(function, "iota").results = (function.inputs[0],)


def use_before_definition(_module, function):
    function.ops.reverse()


def foreign_value(_module, function):
    op = op_of(function, "convert")
    op.operands = (Value(op.operands[0].type),)


def foreign_output(_module, function):
    function.outputs = (*function.outputs[:2], Value(CACHE))


def unused_input(_module, function):
    function.inputs.append(Value(TensorType((), I32), "spare"))


def unused_parameter(module, _function):
    module.add_param(Param("spare", CACHE, Source((("spare", "f32"),), lambda raw: raw)))


def undeclared_parameter(module, _function):
    module.params.clear()


def parameter_of_another_type(module, _function):
    module.params["embed.weight"] = Param("embed.weight", CACHE, module.params["embed.weight"].source)


def double_precision(_module, function):
    f64 = DType("f64", 64, "float", np.dtype(np.float64))
    retype(op_of(function, "reduce"), TensorType((8,), f64))


def impostor_type(_module, function):
    function.inputs[0].type = TensorType((), DType("i32", 64, "int", np.dtype(np.int64)))


def storage_of_another_type(_module, function):
    function.storage = {1: function.inputs[2]}


def storage_outside(_module, function):
    function.storage = {7: function.inputs[2]}


def storage_in_no_input(_module, function):
    function.storage = {2: function.outputs[2]}


def storage_twice(_module, function):
    function.outputs = (*function.outputs, function.outputs[2])
    function.output_names = (*function.output_names, "copy")
    function.storage = {2: function.inputs[2], 3: function.inputs[2]}


def outputs_without_names(_module, function):
    function.output_names = function.output_names[:1]


def outputs_of_one_name(_module, function):
    function.output_names = ("a", "b", "a")


def no_outputs(_module, function):
    function.outputs = function.output_names = ()


def inputs_of_one_name(_module, function):
    function.inputs[1].name = function.inputs[0].name


def layer_operation(_module, function):
    op_of(function, "convert").kind = "rms_norm"


def no_functions(module, _function):
    module.functions.clear()


def kernel_of_other_operands(_module, function):
    op = op_of(function, "kernel")
    op.operands = (op.operands[1], op.operands[0], op.operands[2])


def kernel_of_another_result(_module, function):
    retype(op_of(function, "kernel"), TensorType((1, 2), F32))


def kernel_without_its_index(_module, function):
    op_of(function, "kernel").attrs["indices"] = {}


DAMAGE = {
    double_definition: "convert in model.embed_tokens: a value is defined twice",
    double_definition_of_an_input: "iota in no scope: a value is defined twice",
    use_before_definition: "an operand is used before it is defined",
    foreign_value: "convert in model.embed_tokens: an operand is used before it is defined",
    foreign_output: "function step, its signature: an output is not defined",
    unused_input: "input 'spare' is never used",
    unused_parameter: "module small: no function reads parameter spare",
    undeclared_parameter: "parameter 'embed.weight' is not declared with this type",
    parameter_of_another_type: "parameter 'embed.weight' is not declared with this type",
    double_precision: "reduce in model.layers.1: tensor<8xf64> is of no known element type",
    impostor_type: "tensor<i32> is of no known element type",
    storage_of_another_type: "output 1 cannot live in the storage of 'cache'",
    storage_outside: "output 7 cannot live in the storage of 'cache'",
    storage_in_no_input: "output 2 cannot live in the storage of ''",
    storage_twice: "two outputs cannot live in the storage of one input",
    outputs_without_names: "outputs are needed, each with its own name",
    outputs_of_one_name: "outputs are needed, each with its own name",
    no_outputs: "outputs are needed, each with its own name",
    inputs_of_one_name: "inputs need distinct names",
    layer_operation: "rms_norm in model.embed_tokens: no such operation",
    no_functions: "module small has no function",
    kernel_of_other_operands: "operands or results are not the kernel's",
    kernel_of_another_result: "operands or results are not the kernel's",
    kernel_without_its_index: "kernel in model.layers.1: an index operand is missing",
}


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damage_is_caught_and_named(damage):
    with pytest.raises(EmitError) as error:
        check(damaged(damage), LOWERED)
    assert DAMAGE[damage] in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["", "0", "a b", "_x", "arg_3", "index_0", "x-y", "é "])
def test_inputs_have_names_that_print(name):
    with pytest.raises(EmitError, match="name"):
        check(damaged(lambda module, function: setattr(function.inputs[0], "name", name)), LOWERED)


@pytest.mark.parametrize("name", ["value", "index", "xv", "keep", "token_2", "argmax"])
def test_any_other_name_does_not_meet_the_printers_own(name):
    """Names inside the region of argmax are of no concern to a function's inputs."""
    module = module_of([Case("argmax", ((TensorType((3,), F32), np.zeros(3, np.float32)),), ops.argmax)])
    module.functions["case_0"].inputs[0].name = name
    check(module, LOWERED)
    assert run_stablehlo(print_module(module), "case_0", [np.float32([1, 3, 3])])[0] == 1
