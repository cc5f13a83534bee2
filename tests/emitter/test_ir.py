"""The graph builder: functions, scopes, parameters, and its state after an error."""

from __future__ import annotations

import pytest

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Param, Source, append, current_function, current_path, parameter, scope
from castiron.emitter.graph.types import F32, I32, EmitError, TensorType

ROW = TensorType((4,), F32)


def param(name: str, type_: TensorType = ROW) -> Param:
    return Param(name, type_, Source(((name, "f32"),), lambda raw: raw))


def test_an_error_leaves_no_scope_and_no_function_open():
    module = Module("m")
    with pytest.raises(RuntimeError), module.function("f", x=ROW), scope("layers.0"):
        raise RuntimeError
    assert current_path() == "" and module.functions == {}
    with module.function("f", x=ROW) as (x,):
        assert current_path() == ""
        current_function().returns(x=x)


def test_operations_are_made_inside_a_function():
    with pytest.raises(EmitError, match="no function is being built"):
        ops.constant(1, F32)
    with pytest.raises(EmitError, match="no function is being built"), scope("layers.0"):
        pass


def test_functions_are_distinct_and_return_something():
    module = Module("model")
    with module.function("f", x=ROW) as (x,):
        current_function().returns(x=x)
    with pytest.raises(EmitError, match="module model: two functions are named 'f'"), module.function("f", x=ROW):
        pass
    with pytest.raises(EmitError, match="'g' has no outputs"), module.function("g", x=ROW):
        pass
    assert list(module.functions) == ["f"]


def test_a_function_has_one_node_and_one_type_per_parameter():
    module = Module("m")
    for name in ("f", "g"):
        with module.function(name) as ():
            first, second = parameter(param("w")), parameter(param("w"))
            assert first is second
            current_function().returns(w=first)
    assert [op.kind for f in module.functions.values() for op in f.ops] == ["parameter", "parameter"]
    assert list(module.params) == ["w"]
    with pytest.raises(EmitError, match=r"'w' is used with two types: tensor<4xf32> and tensor<4xi32>"), module.function("h"):
        parameter(param("w", TensorType((4,), I32)))


def test_operands_are_values_of_the_graph():
    with pytest.raises(EmitError, match=r"negate.* in layers.7: operand is not a Value .*: float"), Module("m").function("f"):
        with scope("layers.7"):
            append("negate", (1.5,), (ROW,))


@pytest.mark.parametrize("shape", [(-1,), (2.0,), ("2",)])
def test_extents_are_natural_numbers(shape):
    with pytest.raises(EmitError, match="use non-negative integers"):
        TensorType(shape, F32)
