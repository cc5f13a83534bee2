"""CUDA, ROCm, Metal and Vulkan are compiled for every family; no device runs the code."""

from __future__ import annotations

import os

import pytest

from castiron.emitter.printer import print_module
from castiron.pipelines.compile.build_model import build_module
from castiron.pipelines.compile.options import Options
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.targets import resolve
from tests.emitter.family_harness import pair
from tests.emitter.test_models import SHAPES

TARGETS = ("cuda:sm_80", "rocm:gfx942", "metal")
FAMILIES = sorted(SHAPES) if os.environ.get("CASTIRON_VULKAN") == "all" else ("llama", "qwen3_5_moe_text")


CASES = [(family, target) for family in FAMILIES for target in TARGETS]


# Other architectures compile the same text.
@pytest.mark.parametrize(("family", "target"), [*CASES, ("llama", "cuda:sm_89"), ("llama", "rocm:gfx1100")])
def test_a_family_compiles(family, target, tmp_path):
    made = pair(family, tmp_path / "checkpoint", **SHAPES[family][0])
    options = Options(context=64, prefill=(8,), batch=(), speculate=(), target=target)
    text = print_module(build_module(made.checkpoint, options))
    result = compile_mlir(text, resolve(target), tmp_path / "model.vmfb")
    assert (tmp_path / "model.vmfb").stat().st_size > 1000
    assert any("iree-hal-target-device" in flag for flag in result.flags)
