"""The printed text: equal graphs print equal bytes, numbers come back to the same bits, two
compilers read it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from castiron.emitter import ops
from castiron.emitter.ir import Module, Op, Value, current_function
from castiron.emitter.operations import number
from castiron.emitter.printer import argument_params, print_module
from castiron.emitter.types import BF16, DTYPES, F16, F32, DType, EmitError, TensorType
from castiron.reference.interpreter import run
from castiron.reference.xla import run_stablehlo
from tests.emitter.small import append_kernel, small_arguments, small_module, small_results

GOLDEN = Path(__file__).parent / "golden"
FORMS = {"kernel.mlir": (True, "parameters"), "parameters.mlir": (False, "parameters"), "arguments.mlir": (False, "arguments")}


def printed(form: str) -> str:
    with_kernel, weights = FORMS[form]
    return print_module(small_module(with_kernel), weights)


@pytest.mark.parametrize("form", FORMS)
def test_golden(form):
    """A change of this text is a change of every cache key and bundle: let it be on purpose, then
    write the file anew.
    """
    assert printed(form) == (GOLDEN / form).read_text()


def test_equal_graphs_print_equal_bytes_in_every_process():
    program = (
        "import sys; from castiron.emitter.printer import print_module; from tests.emitter.small import small_module\n"
        f"for form in {list(FORMS.values())}: sys.stdout.write(print_module(small_module(form[0]), form[1]))"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert texts == {"".join(map(printed, FORMS))}


def test_three_ways_to_the_same_numbers(iree):
    """The interpreter, IREE and XLA run the printed forms to what NumPy says."""
    inputs, params = small_arguments()
    portable, with_kernel = small_module(False), small_module(True)
    weights = [params[name] for name in argument_params(portable, portable.functions["step"])]
    got = {
        "interpreter": (False, run(portable, "step", inputs, params)),
        "interpreter, kernel": (True, run(with_kernel, "step", inputs, params)),
        "IREE": (False, iree(printed("parameters.mlir"), params).run("step", inputs)),
        "IREE, arguments": (False, iree(printed("arguments.mlir")).run("step", inputs + weights)),
        "IREE, kernel": (True, iree(printed("kernel.mlir"), params).run("step", inputs)),
        "XLA": (False, run_stablehlo(printed("arguments.mlir"), "step", inputs + weights)),
    }
    for where, (kernel, results) in got.items():
        for result, want in zip(results, small_results(kernel), strict=True):
            np.testing.assert_allclose(result, want, rtol=2e-6, atol=2e-6, err_msg=where)


def bits(dtype: DType) -> st.SearchStrategy[int]:
    """Any bits, with the edges (zeros, subnormals, infinities, NaN) more often than chance."""
    top = 2**dtype.bits
    exponent = {"f32": 23, "f16": 10, "bf16": 7}[dtype.name]
    edges = [e * 2**exponent + d for e in range(top >> exponent) if e % 64 in (0, 1, 63) for d in (-1, 0, 1)]
    return st.integers(0, top - 1) | st.sampled_from([e % top for e in edges])


def read_back(array: np.ndarray, dtype: DType) -> np.ndarray:
    """The array that MLIR's own parser reads out of the text of a constant; it prints a long one as
    its bytes.
    """
    module = Module("m")
    with module.function("f"):
        # Built by hand: the stored bits must not pass through a conversion.
        value = Value(TensorType(array.shape, dtype))
        current_function().ops.append(Op("constant", (), (value,), {"value": array}, ""))
        current_function().returns(y=value)
    from jax.extend.mlir import ir
    from jax.interpreters.mlir import make_ir_context

    with make_ir_context():
        parsed = ir.Module.parse(print_module(module))
        attribute = str(parsed.body.operations[0].regions[0].blocks[0].operations[0].attributes["value"])
    prefix, words, suffix = attribute.split('"')
    assert (prefix, suffix) == ("dense<", f"> : {value.type}")
    return np.frombuffer(bytes.fromhex(words.removeprefix("0x")), dtype.numpy)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@given(data=st.data())
def test_floats_come_back_to_the_same_bits(dtype, data):
    words = data.draw(st.lists(bits(dtype), min_size=1, max_size=300)) + list(range(128))
    array = np.array(words, f"uint{dtype.bits}").view(dtype.numpy)
    assert read_back(array, dtype).view(f"uint{dtype.bits}").tolist() == words


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_float_comes_back(dtype):
    words = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(read_back(words.view(dtype.numpy), dtype).view(np.uint16), words)


@given(st.integers(0, 2**32 - 1))
def test_a_finite_float_is_a_decimal_that_every_reader_takes(word):
    value = np.array(word, np.uint32).view(np.float32)
    if np.isfinite(value):
        text = number(value, F32)
        mantissa, _, exponent = text.partition("e")
        # MLIR takes 1.0e-05 but neither 1e-05 nor e+5.
        assert "." in mantissa and exponent.lstrip("-").isdigit()
        assert np.float32(text).view(np.uint32) == word


@pytest.mark.parametrize("dtype", [d for d in DTYPES.values() if d.kind in ("int", "uint")], ids=str)
def test_integers_print_all_digits(dtype):
    limits = np.iinfo(dtype.numpy)
    for n in (limits.min, 0, limits.max):
        assert number(np.array(n, dtype.numpy), dtype) == str(n)


def test_rejects_an_unknown_form_of_weights():
    with pytest.raises(EmitError, match="unknown form of weights: 'inline'"):
        print_module(small_module(False), weights="inline")


def test_two_kernels_of_one_name_are_refused():
    module = small_module(True)
    other = replace(append_kernel(), text="stream.executable private @append_row {}")
    with module.function("other", **{v.name: v.type for v in module.functions["step"].inputs}) as (token, pos, cache):
        row = ops.constant(0, F32, (8,))
        current_function().returns(
            cache=ops.kernel_call(other, row=row, position=pos, cache=cache, layer=0)["cache"], token=token
        )
    with pytest.raises(EmitError, match="two different kernels are called 'append_row'"):
        print_module(module)


def test_kernels_are_sorted_without_duplicates():
    module = small_module(True)
    first = append_kernel()
    other = replace(first, name="a_" + first.name, text=first.text.replace("append_row", "a_append_row"))
    with module.function("other", **{v.name: v.type for v in module.functions["step"].inputs}) as (token, pos, cache):
        row = ops.constant(0, F32, (8,))
        for kernel in (first, other):
            cache = ops.kernel_call(kernel, row=row, position=pos, cache=cache, layer=0)["cache"]
        current_function().returns(cache=cache, token=token)
    text = print_module(module)
    assert text.index("private @a_append_row {") < text.index("private @append_row {")
    assert text.count("private @append_row {") == 1


def test_a_layer_operation_is_not_text_yet():
    module = small_module(False)
    op = module.functions["step"].ops[3]
    op.kind = "rms_norm"
    with pytest.raises(EmitError, match="rms_norm in model.embed_tokens is not a StableHLO operation; lower the module first"):
        print_module(module)


def test_names_of_parameters_are_quoted():
    text = printed("parameters.mlir").replace("embed.weight", 'a"b\\c')
    module = small_module(False)
    (known,) = module.params.values()
    module.params = {'a"b\\c': replace(known, name='a"b\\c')}
    for op in module.functions["step"].ops:
        if op.kind == "parameter":
            op.attrs["name"] = 'a"b\\c'
    assert print_module(module) == text.replace('a"b\\c', 'a\\"b\\\\c')
