"""XLA runs the functions of a module on stored arrays, and rejects invalid ones."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.reference.xla import run_stablehlo

TEXT = """module @m {
  func.func public @double(%x: tensor<2xbf16>, %flag: tensor<i1>) -> (tensor<2xbf16>, tensor<i1>) {
    %0 = stablehlo.add %x, %x : tensor<2xbf16>
    return %0, %flag : tensor<2xbf16>, tensor<i1>
  }
  func.func public @wide(%n: tensor<1xi32>, %b: tensor<2xi8>) -> (tensor<1xi32>, tensor<2xi8>) {
    %0 = stablehlo.add %n, %n : tensor<1xi32>
    return %0, %b : tensor<1xi32>, tensor<2xi8>
  }
}
"""


def test_each_function_of_a_module_runs():
    doubled, flag = run_stablehlo(TEXT, "double", [np.array([0x3F80, 0x4040], np.uint16), np.array(True)])
    assert doubled.dtype == np.uint16 and doubled.tolist() == [0x4000, 0x40C0] and flag.item() is True
    number, signed = run_stablehlo(TEXT, "wide", [np.array([2**20], np.int32), np.array([255, 1], np.uint8)])
    assert number.tolist() == [2**21] and signed.dtype == np.int8 and signed.tolist() == [-1, 1]


@pytest.mark.parametrize(
    "text, function, args, words",
    [
        (TEXT.replace("stablehlo.add", "stablehlo.join"), "wide", [], "not a StableHLO module"),
        (TEXT, "half", [], "no function 'half'"),
        (TEXT, "wide", [np.array([1])], "takes 2 arguments, got 1"),
        (TEXT, "wide", [np.array([1]), np.zeros(2, np.int8)], r"an argument must be int32\[1\]; got int64\[1\]"),
    ],
)
def test_rejects_invalid_text_and_arguments(text, function, args, words):
    with pytest.raises(ValueError, match=words):
        run_stablehlo(text, function, args)
