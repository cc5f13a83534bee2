"""The interpreter where the specification is easily got wrong, against numbers written down or another definition.

That it agrees with two compilers on every operation is tested with the operations (tests/emitter/test_ops.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from castiron.emitter import ops
from castiron.emitter.ir import Module, Param, Source, Value, current_function, parameter, scope
from castiron.emitter.kernels.kernel import INDEX, Kernel
from castiron.emitter.printer import print_module
from castiron.emitter.types import (
    BF16,
    DTYPES,
    F16,
    F32,
    I1,
    I8,
    I32,
    I64,
    UI8,
    UI32,
    DType,
    EmitError,
    TensorType,
    from_f32,
    to_f32,
)
from castiron.reference.interpreter import convert, run
from castiron.reference.xla import run_stablehlo
from tests.emitter.small import small_arguments, small_module, small_results


def module_of(build: Callable[..., Value], *types: TensorType) -> Module:
    module = Module("m")
    with module.function("f", **{f"x{i}": t for i, t in enumerate(types)}) as inputs:
        current_function().returns(y=build(*inputs))
    return module


def call(build: Callable[..., Value], *args: tuple[DType, object]) -> np.ndarray:
    """`build` of arrays given as (element type, stored values)."""
    arrays = [np.asarray(values, d.numpy) for d, values in args]
    types = [TensorType(a.shape, d) for (d, _), a in zip(args, arrays)]
    return run(module_of(build, *types), "f", arrays)[0]


@pytest.mark.parametrize("start, first", [(-5, 0), (0, 0), (2, 2), (3, 3), (4, 3), (2**31 - 1, 3), (-(2**31), 0)])
def test_windows_are_moved_inside(start, first):
    x = np.arange(6, dtype=np.int32)
    cut = call(lambda x, s: ops.dynamic_slice(x, (s,), (3,)), (I32, x), (I32, start))
    assert cut.tolist() == x[first : first + 3].tolist()
    written = call(lambda x, u, s: ops.dynamic_update_slice(x, u, (s,)), (I32, x), (I32, [-1, -2, -3]), (I32, start))
    want = x.copy()
    want[first : first + 3] = -1, -2, -3
    assert written.tolist() == want.tolist()


def test_an_update_leaves_its_operand_as_it_was():
    x = np.zeros(4, np.float32)
    module = Module("m")
    with module.function("f", x=TensorType((4,), F32), s=TensorType((), I32)) as (x_, s):
        one = ops.constant(1, F32, (1,))
        current_function().returns(new=ops.dynamic_update_slice(x_, one, (s,)), old=ops.negate(x_))
    new, old = run(module, "f", [x, np.array(2, np.int32)])
    assert new.tolist() == [0, 0, 1, 0] and not old.any() and not x.any()


@pytest.mark.parametrize("dtype", [I8, UI8, I32, UI32, I64], ids=str)
def test_integers_wrap_and_divide_towards_zero(dtype):
    limits = np.iinfo(dtype.numpy)
    assert call(ops.add, (dtype, [limits.max]), (dtype, [1])).tolist() == [limits.min]
    assert call(ops.multiply, (dtype, [limits.max]), (dtype, [2])).tolist() == [limits.max - 1 if limits.min == 0 else -2]
    signs = [1] if limits.min == 0 else [1, -1]
    pairs = [(a * s, b * t) for a in (0, 1, 7, 8) for b in (1, 3, 4) for s in signs for t in signs]
    quotients = call(ops.divide, (dtype, [a for a, _ in pairs]), (dtype, [b for _, b in pairs]))
    assert quotients.tolist() == [int(a / b) for a, b in pairs]


def test_what_is_left_open_is_as_xla_does():
    """Division by zero, of the least number by -1, and conversion of floats that no integer of the type is near."""
    least = np.iinfo(np.int32).min
    numbers, divisors = np.array([7, -7, 0, least], np.int32), np.array([0, 0, 0, -1], np.int32)
    wild = np.array([np.nan, np.inf, -np.inf, 3e9, -3e9, 300, -300, 1e19, -1e19, 2.0**31, 2.0**63], np.float32)

    def build(a, b, x):
        return [ops.divide(a, b)] + [ops.convert(x, d) for d in (I32, I64, UI32, I8, UI8, I1)]

    module = Module("m")
    types = TensorType((4,), I32), TensorType((4,), I32), TensorType(wild.shape, F32)
    with module.function("f", a=types[0], b=types[1], x=types[2]) as inputs:
        current_function().returns(**{f"y{i}": v for i, v in enumerate(build(*inputs))})
    arguments = [numbers, divisors, wild]
    for got, want in zip(run(module, "f", arguments), run_stablehlo(print_module(module), "f", arguments), strict=True):
        assert got.tolist() == want.tolist() and got.dtype == want.dtype


def test_nan_spreads_through_the_maximum_and_compares_with_nothing():
    a, b = [np.nan, 1, np.nan, -0.0], [1, np.nan, np.nan, 0.0]
    for dtype in (F32, F16, BF16):
        x, y = ((dtype, from_f32(np.float32(v), dtype)) for v in (a, b))
        for op in (ops.maximum, ops.minimum):
            assert np.isnan(to_f32(call(op, x, y), dtype)[:3]).all()
        for direction, wanted in {"EQ": 0, "LT": 0, "LE": 0, "GT": 0, "GE": 0, "NE": 1}.items():
            got = call(lambda p, q: ops.compare(direction, p, q), x, y)
            assert got[:3].tolist() == [bool(wanted)] * 3 and got[3] == (direction in ("EQ", "LE", "GE"))
        largest = call(lambda p: ops.reduce("maximum", p, (0,)), x)
        assert np.isnan(to_f32(largest, dtype))


def test_unsigned_integers_compare_as_unsigned():
    assert call(lambda a, b: ops.compare("LT", a, b), (UI8, [200]), (UI8, [100])).tolist() == [False]
    assert call(lambda a, b: ops.compare("LT", a, b), (I8, [-56]), (I8, [100])).tolist() == [True]


@pytest.mark.parametrize("dtype, numpy", [(F16, np.float16), (BF16, ml_dtypes.bfloat16)], ids=["f16", "bf16"])
@given(words=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
@example(words=[0x7F800001, 0xFF800001, 0x7FFFFFFF, 0x7F7FFFFF, 0x80000001, 0x3F808000, 0x3F818000])
def test_narrowing_rounds_to_nearest_even(dtype, numpy, words):
    """As NumPy and ml_dtypes do, over all of f32."""
    x = np.array(words, np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        got, want = to_f32(convert(x, F32, dtype), dtype), x.astype(numpy).astype(np.float32)
    assert np.array_equal(got, want, equal_nan=True) and np.array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("dtype, numpy", [(F16, np.float16), (BF16, ml_dtypes.bfloat16)], ids=["f16", "bf16"])
@given(a=st.integers(0, 2**16 - 1), b=st.integers(0, 2**16 - 1))
def test_half_precision_rounds_after_every_operation(dtype, numpy, a, b):
    x, y = (np.array([w], np.uint16) for w in (a, b))
    for op, reference in ((ops.add, np.add), (ops.multiply, np.multiply), (ops.subtract, np.subtract), (ops.divide, np.divide)):
        with np.errstate(all="ignore"):
            want = reference(x.view(numpy), y.view(numpy)).astype(np.float32)
        got = to_f32(call(op, (dtype, x.view(dtype.numpy)), (dtype, y.view(dtype.numpy))), dtype)
        assert np.array_equal(got, want, equal_nan=True)


def test_integers_convert_modulo_their_width():
    assert convert(np.array([300, -1, 128], np.int32), I32, I8).tolist() == [44, -1, -128]
    assert convert(np.array([-1, -128], np.int8), I8, UI32).tolist() == [2**32 - 1, 2**32 - 128]
    assert convert(np.array([0, 2, -3], np.int8), I8, I1).tolist() == [False, True, True]
    assert convert(np.array([True, False]), I1, F32).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("first", [0, 1])
def test_ties_of_the_largest_go_to_the_lowest_index(first):
    x = np.full(9, -3, np.float32)
    x[[first, 4, 8]] = 2
    assert call(ops.argmax, (F32, x)) == first
    assert call(ops.argmax, (F32, np.full(5, -np.inf, np.float32))) == 0


def test_rows_outside_a_table_are_the_nearest_inside():
    table = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert call(ops.gather_rows, (F32, table), (I32, [-1, 3, 1])).tolist() == [[0, 1], [4, 5], [2, 3]]


@given(data=st.data())
def test_dot_general_is_einsum(data):
    """Against NumPy's own reading of the same contraction, on integers so that every sum is exact."""
    names = data.draw(st.lists(st.sampled_from("bcxy"), min_size=1, max_size=5))
    labels = {"b": "BD", "c": "KL", "x": "MN", "y": "PQ"}
    used = {kind: labels[kind][: min(2, names.count(kind))] for kind in labels}
    side_a = data.draw(st.permutations(used["b"] + used["c"] + used["x"]))
    side_b = data.draw(st.permutations(used["b"] + used["c"] + used["y"]))
    size = {label: data.draw(st.integers(1, 4)) for group in used.values() for label in group}
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    a, b = (rng.integers(-9, 9, [size[n] for n in side]).astype(np.float32) for side in (side_a, side_b))
    where = lambda side, wanted: [side.index(n) for n in wanted]
    contract = where(side_a, used["c"]), where(side_b, used["c"])
    batch = where(side_a, used["b"]), where(side_b, used["b"])
    out = [*used["b"], *(n for n in side_a if n in used["x"]), *(n for n in side_b if n in used["y"])]
    want = np.einsum(f"{''.join(side_a)},{''.join(side_b)}->{''.join(out)}", a, b)
    assert np.array_equal(call(lambda p, q: ops.dot_general(p, q, contract, batch), (F32, a), (F32, b)), want)


@given(data=st.data())
def test_sums_and_maxima_are_of_the_elements_alone(data):
    """Whatever a reduction starts from must leave no trace: not in a maximum of negative numbers, not in a sum."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    dims = tuple(data.draw(st.permutations(range(len(shape))))[: data.draw(st.integers(0, len(shape)))])
    x = np.random.default_rng(data.draw(st.integers(0, 99))).integers(-9, 0, shape).astype(np.float32)
    assert np.array_equal(call(lambda v: ops.reduce("maximum", v, dims), (F32, x)), x.max(dims))
    assert np.array_equal(call(lambda v: ops.reduce("add", v, dims), (F32, x)), x.sum(dims))


def test_i8_products_keep_their_width():
    assert call(lambda a, b: ops.dot_general(a, b, ((0,), (0,))), (I8, [100, 100]), (I8, [2, 1])) == 44


def test_constants_and_counts_have_their_stored_form():
    for dtype in DTYPES.values():
        array = call(lambda: ops.constant(1, dtype, (2, 2)))
        assert array.dtype == dtype.numpy and array.shape == (2, 2)
        assert (to_f32(array, dtype) if dtype.kind == "float" else array).tolist() == [[1, 1], [1, 1]]
    assert call(lambda: ops.iota((2, 3), 1, F16)).tolist() == [[0, 1, 2], [0, 1, 2]]


def test_a_module_runs_with_parameters_and_kernels():
    inputs, params = small_arguments()
    for kernel in (False, True):
        for got, want in zip(run(small_module(kernel), "step", inputs, params), small_results(kernel), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-6)
    assert np.array_equal(inputs[2], small_arguments()[0][2]), "an input was changed"


def test_trace_sees_every_operation_in_order_with_its_path():
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
    kernel = Kernel("k", operands, {"y": TensorType((2,), F32)}, "", reference, 0, 0)
    module = Module("m")
    with module.function("f", **kernel.tensors) as inputs, scope("attn"):
        indices = dict(zip(kernel.indices, range(5, 9)))
        current_function().returns(**ops.kernel_call(kernel, **dict(zip(kernel.tensors, inputs)), **indices))
    return module


def test_kernels_get_bytes_as_uint8_and_indices_by_name():
    def reference(second, packed, first):
        assert (first, second) == (5, 6) and packed.dtype == np.uint8
        return {"y": packed.astype(np.float32)}

    module = kernel_of(reference, first=INDEX, packed=TensorType((2,), I8), second=INDEX)
    for stored in (np.array([200, 3], np.uint8), np.array([-56, 3], np.int8)):
        assert run(module, "f", [stored])[0].tolist() == [200, 3]


def test_a_kernel_cannot_write_into_what_others_read():
    def reference(x):
        x[0] = 1
        return {"y": x}

    with pytest.raises(ValueError, match="read-only"):
        run(kernel_of(reference, x=TensorType((2,), F32)), "f", [np.zeros(2, np.float32)])


@pytest.mark.parametrize(
    "result, words",
    [
        (np.zeros(2, np.float32), "kernel k returns ndarray, not y by name"),
        ({"z": np.zeros(2, np.float32)}, "kernel k returns results z, not y by name"),
        ({"y": np.zeros(3, np.float32)}, r"kernel in attn is tensor<2xf32>, got an array float32\[3\]"),
        ({"y": np.zeros(2)}, r"kernel in attn is tensor<2xf32>, got an array float64\[2\]"),
    ],
)
def test_a_kernel_whose_reference_is_not_its_type_is_refused(result, words):
    with pytest.raises(EmitError, match=words):
        run(kernel_of(lambda x: result, x=TensorType((2,), F32)), "f", [np.zeros(2, np.float32)])


def test_wrong_arguments_are_refused():
    inputs, params = small_arguments()
    module = small_module(True)
    with pytest.raises(EmitError, match="no function 'decode', only step"):
        run(module, "decode", inputs, params)
    with pytest.raises(EmitError, match="takes 3 inputs, got 2"):
        run(module, "step", inputs[:2], params)
    with pytest.raises(EmitError, match=r"input 'pos' of step is tensor<i32>, got an array int64\[\]"):
        run(module, "step", [inputs[0], np.array(1), inputs[2]], params)
    with pytest.raises(EmitError, match="parameter 'embed.weight' was not given"):
        run(module, "step", inputs)
    with pytest.raises(EmitError, match=r"parameter 'embed.weight' is tensor<5x8xbf16>, got an array float32\[5, 8\]"):
        run(module, "step", inputs, {"embed.weight": np.zeros((5, 8), np.float32)})
    module.functions["step"].ops[3].kind = "rms_norm"
    with pytest.raises(EmitError, match="rms_norm in model.embed_tokens is no operation of the interpreter"):
        run(module, "step", inputs, params)


def test_arrays_are_let_go_after_their_last_use():
    """Widened weights would not fit in memory together: two of three are gone before the last one is made."""
    module, type_ = Module("m"), TensorType((64,), F16)
    params = {f"w{i}": np.ones(64, np.float16) for i in range(3)}
    with module.function("f") as ():
        sums = []
        for name in params:
            weight = parameter(Param(name, type_, Source(((name, "f16"),), lambda raw: raw)))
            sums.append(ops.reduce("add", ops.convert(weight, F32), (0,)))
        current_function().returns(y=ops.add(sums[0], ops.add(sums[1], sums[2])))
    alive, most = [], []

    def trace(op, results):
        if op.kind == "convert":
            alive.append(weakref.ref(results[0]))
        most.append(sum(ref() is not None for ref in alive))

    assert run(module, "f", [], params, trace)[0] == 192
    assert max(most) == 1
