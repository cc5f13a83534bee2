"""Equal graphs print equal bytes, numbers are read back to the same bits, two compilers read them."""

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

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Module, Op, Value, current_function
from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.types import BF16, F16, F32, DType, EmitError, TensorType
from castiron.emitter.kernels.kernel import Kernel, kernel_call
from tests.emitter.small import append_kernel, small_module

GOLDEN = Path(__file__).parent / "golden"
FORMS = {"kernel.mlir": (True, "parameters"), "parameters.mlir": (False, "parameters"), "arguments.mlir": (False, "arguments")}


def printed(form: str) -> str:
    with_kernel, weights = FORMS[form]
    return print_module(small_module(with_kernel), weights)


@pytest.mark.parametrize("form", FORMS)
def test_golden(form):
    """A change of this text changes every cache key and bundle; write the file if it is intended."""
    assert printed(form) == (GOLDEN / form).read_text()


def test_equal_graphs_print_equal_bytes_in_every_process():
    program = (
        "import sys; from castiron.emitter.graph.printer import print_module; from tests.emitter.small import small_module\n"
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


# Words of f32, the edges (zeros, subnormals, infinities, NaN) more often than by chance.
EDGES = [(e * 2**23 + d) % 2**32 for e in range(2**9) if e % 64 in (0, 1, 63) for d in (-1, 0, 1)]
WORDS = st.integers(0, 2**32 - 1) | st.sampled_from(EDGES)


def read_back(array: np.ndarray, dtype: DType) -> np.ndarray:
    """Return the array that MLIR's own parser reads from the text of a constant."""
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


@given(words=st.lists(WORDS, min_size=1, max_size=300))
def test_floats_come_back_to_the_same_bits(words):
    words = words + list(range(128))
    assert read_back(np.array(words, np.uint32).view(np.float32), F32).view(np.uint32).tolist() == words


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_16_bit_float_comes_back(dtype):
    words = np.arange(2**16, dtype=np.uint16)
    assert np.array_equal(read_back(words.view(dtype.numpy), dtype).view(np.uint16), words)


def test_rejects_an_unknown_form_of_weights():
    with pytest.raises(EmitError, match="unknown form of weights: 'inline'"):
        print_module(small_module(False), weights="inline")


def text_with(*kernels: Kernel) -> str:
    """Return the text of the small module and a function that calls `kernels`."""
    module = small_module(True)
    with module.function("other", **{v.name: v.type for v in module.functions["step"].inputs}) as (token, pos, cache):
        row = ops.constant(0, F32, (8,))
        for kernel in kernels:
            cache = kernel_call(kernel, row=row, position=pos, cache=cache, layer=0)["cache"]
        current_function().returns(cache=cache, token=token)
    return print_module(module)


def test_rejects_two_kernels_of_one_name():
    with pytest.raises(EmitError, match="two different kernels are named 'append_row'"):
        text_with(replace(append_kernel(), workgroups=2))


def test_kernels_are_sorted_without_duplicates():
    first = append_kernel()
    text = text_with(first, replace(first, name="a_" + first.name))
    assert text.index("private @a_append_row {") < text.index("private @append_row {")
    assert text.count("private @append_row {") == 1


def test_rejects_a_layer_operation():
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
