"""How the interpreter runs modules and kernels; test_ops.py compares its operations."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Param, Source, current_function, parameter, scope
from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.types import BF16, F16, F32, I1, I8, I32, EmitError, TensorType, from_f32, to_f32
from castiron.emitter.kernels.kernel import INDEX, Kernel, kernel_call
from castiron.reference.interpreter import convert, run
from castiron.reference.xla import run_stablehlo
from tests.emitter.small import small_arguments, small_module, small_results


def test_an_update_does_not_change_its_operand():
    x = np.zeros(4, np.float32)
    module = Module("m")
    with module.function("f", x=TensorType((4,), F32), s=TensorType((), I32)) as (x_, s):
        one = ops.constant(1, F32, (1,))
        current_function().returns(new=ops.dynamic_update_slice(x_, one, (s,)), old=ops.negate(x_))
    new, old = run(module, "f", [x, np.array(2, np.int32)])
    assert new.tolist() == [0, 0, 1, 0] and not old.any() and not x.any()


def test_undefined_results_are_those_of_xla():
    """Division by zero, of the minimum by -1, and conversion of floats out of range."""
    smallest = np.iinfo(np.int32).min
    numbers, divisors = np.array([7, -7, 0, smallest], np.int32), np.array([0, 0, 0, -1], np.int32)
    wild = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 300, -300, 2.0**31], np.float32)

    def build(a, b, x):
        return [ops.divide(a, b)] + [ops.convert(x, d) for d in (I32, I8, I1)]

    module = Module("m")
    types = TensorType((4,), I32), TensorType((4,), I32), TensorType(wild.shape, F32)
    with module.function("f", a=types[0], b=types[1], x=types[2]) as inputs:
        current_function().returns(**{f"y{i}": v for i, v in enumerate(build(*inputs))})
    arguments = [numbers, divisors, wild]
    for got, want in zip(run(module, "f", arguments), run_stablehlo(print_module(module), "f", arguments), strict=True):
        assert got.tolist() == want.tolist() and got.dtype == want.dtype


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_nan_spreads_through_the_maximum_of_a_vector(dtype):
    module = Module("m")
    with module.function("f", x=TensorType((3,), dtype)) as (x,):
        current_function().returns(y=ops.reduce("maximum", x, (0,)))
    (found,) = run(module, "f", [from_f32(np.float32([np.nan, 1, -0.0]), dtype)])
    assert np.isnan(to_f32(found, dtype))


@pytest.mark.parametrize("dtype, numpy", [(F16, np.float16), (BF16, ml_dtypes.bfloat16)], ids=["f16", "bf16"])
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@example(words=[0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F7FFFFF, 0x80000001, 0x3F808000, 0x3F818000])
def test_narrowing_rounds_to_nearest_even(dtype, numpy, words):
    """As NumPy and ml_dtypes do, over all of f32."""
    x = np.array(words, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        got, want = to_f32(convert(x, F32, dtype), dtype), x.astype(numpy).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(want))


def test_a_module_runs_with_parameters_and_kernels():
    inputs, params = small_arguments()
    for kernel in (False, True):
        for got, want in zip(run(small_module(kernel), "step", inputs, params), small_results(kernel), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.array_equal(inputs[2], small_arguments()[0][2]), "an input was changed"


def test_trace_gets_every_operation_in_order():
    inputs, params = small_arguments()
    module = small_module(True)
    seen = []
    outputs = run(module, "step", inputs, params, trace=lambda op, results: seen.append((op, results)))
    body = module.functions["step"]
    assert [op for op, _ in seen] == body.ops
    for op, results in seen:
        assert [r.shape for r in results] == [v.shape for v in op.results]
        assert [r.dtype for r in results] == [v.dtype.numpy for v in op.results]
    by_value = {v: r for op, results in seen for v, r in zip(op.results, results)}
    for value, output in zip(body.outputs, outputs):
        assert np.array_equal(by_value[value], output)


def kernel_of(reference: Callable, **operands: TensorType | str) -> Module:
    kernel = Kernel("k", operands, {"y": TensorType((2,), F32)}, 1, lambda b, **given: None, reference)
    module = Module("m")
    with module.function("f", **kernel.tensors) as inputs, scope("attn"):
        indices = dict(zip(kernel.indices, range(5, 9)))
        current_function().returns(**kernel_call(kernel, **dict(zip(kernel.tensors, inputs)), **indices))
    return module


def test_kernels_get_bytes_as_uint8_and_indices_by_name():
    def reference(second, packed, first):
        assert (first, second) == (5, 6) and packed.dtype == np.uint8
        return {"y": packed.astype(np.float32)}

    module = kernel_of(reference, first=INDEX, packed=TensorType((2,), I8), second=INDEX)
    for stored in (np.array([200, 3], np.uint8), np.array([-56, 3], np.int8)):
        assert run(module, "f", [stored])[0].tolist() == [200, 3]


def test_a_kernel_cannot_write_to_its_operands():
    def reference(x):
        x[0] = 1
        return {"y": x}

    with pytest.raises(ValueError, match="read-only"):
        run(kernel_of(reference, x=TensorType((2,), F32)), "f", [np.zeros(2, np.float32)])


@pytest.mark.parametrize(
    "result, words",
    [
        (np.zeros(2, np.float32), "kernel k returns ndarray; it must return a dict of y"),
        ({"z": np.zeros(2, np.float32)}, "kernel k returns results z; it must return a dict of y"),
        ({"y": np.zeros(3, np.float32)}, r"kernel in attn is an array of float32\[3\]; it must be tensor<2xf32>"),
        ({"y": np.zeros(2)}, r"kernel in attn is an array of float64\[2\]; it must be tensor<2xf32>"),
    ],
)
def test_rejects_kernel_results_of_a_wrong_type(result, words):
    with pytest.raises(EmitError, match=words):
        run(kernel_of(lambda x: result, x=TensorType((2,), F32)), "f", [np.zeros(2, np.float32)])


def test_rejects_invalid_arguments():
    inputs, params = small_arguments()
    module = small_module(True)
    with pytest.raises(EmitError, match="no function 'decode'; use step"):
        run(module, "decode", inputs, params)
    with pytest.raises(EmitError, match="takes 3 inputs, got 2"):
        run(module, "step", inputs[:2], params)
    with pytest.raises(EmitError, match=r"input 'pos' of step is an array of int64\[\]; it must be tensor<i32>"):
        run(module, "step", [inputs[0], np.array(1), inputs[2]], params)
    with pytest.raises(EmitError, match="no array for parameter 'embed.weight'"):
        run(module, "step", inputs)
    with pytest.raises(
        EmitError, match=r"parameter 'embed.weight' is an array of float32\[5, 8\]; it must be tensor<5x8xbf16>"
    ):
        run(module, "step", inputs, {"embed.weight": np.zeros((5, 8), np.float32)})
    module.functions["step"].ops[3].kind = "rms_norm"
    with pytest.raises(EmitError, match="rms_norm in model.embed_tokens has no rule in the interpreter"):
        run(module, "step", inputs, params)


def test_arrays_are_freed_after_their_last_use():
    """Two of three weights are freed before the last one is converted to f32."""
    module, type_ = Module("m"), TensorType((64,), F16)
    params = {f"w{i}": np.ones(64, np.float16) for i in range(3)}
    with module.function("f") as ():
        sums = []
        for name in params:
            weight = parameter(Param(name, type_, Source(((name, "f16"),), lambda raw: raw)))
            sums.append(ops.reduce("add", ops.convert(weight, F32), (0,)))
        current_function().returns(y=ops.add(sums[0], ops.add(sums[1], sums[2])))
    alive, alive_counts = [], []

    def trace(op, results):
        if op.kind == "convert":
            alive.append(weakref.ref(results[0]))
        alive_counts.append(sum(ref() is not None for ref in alive))

    assert run(module, "f", [], params, trace)[0] == 192
    assert max(alive_counts) == 1
