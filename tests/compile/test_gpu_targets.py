"""Compile for CUDA, ROCm, Metal and Vulkan, and choose a device; no device runs the code."""

from __future__ import annotations

import os

import pytest

from castiron.emitter.graph.printer import print_module
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.build_model import build_module
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.open_model import cached_path
from castiron.pipelines.compile.quantise_gguf import quantise
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.device import gpus
from castiron.vmfb.targets import resolve
from tests.emitter.family_harness import pair
from tests.emitter.test_models import SHAPES

TARGETS = ("cuda:sm_80", "rocm:gfx942", "metal")
CASES = [(family, target) for family in sorted(SHAPES) for target in TARGETS]
PREFILLED = sorted(SHAPES) if os.environ.get("CASTIRON_VULKAN") == "all" else ("llama", "qwen3_5_moe_text")


# Other architectures compile the same text.
@pytest.mark.parametrize(("family", "target"), [*CASES, ("llama", "cuda:sm_89"), ("llama", "rocm:gfx1100")])
def test_a_family_compiles(family, target, tmp_path):
    made = pair(family, tmp_path / "checkpoint", **SHAPES[family][0])
    options = Options(context=64, prefill=(8,), batch=(), verify_widths=(), target=target)
    module = build_module(made.checkpoint, options)
    # The prefill of other families has hardly any other kernels, and takes longer to compile.
    part = module if family in PREFILLED else module.part("decode_step")
    result = compile_mlir(print_module(part), resolve(target), tmp_path / "model.vmfb")
    assert (tmp_path / "model.vmfb").stat().st_size > 1000
    assert any("iree-hal-target-device" in flag for flag in result.flags)


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """Return the path of a GGUF file with q8_0 weights."""
    folder = tmp_path_factory.mktemp("quantised")
    checkpoint = tiny_model("llama", folder / "checkpoint", hidden_size=64, intermediate_size=64)
    quantise(checkpoint, folder / "model.gguf", Options(weights="q8_0"), lambda stage, done: None)
    return folder / "model.gguf"


def test_a_quantised_draft_compiles_for_a_gpu_which_cpu_commands_refuse(quantised, tmp_path, capsys):
    path = compile_model(quantised, tmp_path / "draft", Options.for_draft("vulkan")).bundle
    manifest = open_bundle(path).manifest
    assert manifest.numerics == "exact" and "q4_0" in manifest.known_answer.matmuls
    for command in ("bench", "explain"):
        assert cli.main([command, str(path)]) == 1
        assert f"castiron {command} measures CPU kernels" in capsys.readouterr().err


def test_a_device_is_checked_before_a_model_is_compiled_for_it(quantised, monkeypatch, capsys):
    def fail(name):
        raise RuntimeError("UNAVAILABLE; no libcuda.so")

    monkeypatch.setattr(gpus, "create_hal_driver", fail)
    run = ["run", str(quantised), "--tokens", "5", "--device"]
    assert cli.main([*run, "cuda:0"]) == 1
    assert capsys.readouterr().err == "castiron: cannot use cuda (no libcuda.so); it needs NVIDIA's driver with libcuda.so\n"
    assert not cached_path(quantised, Options(target="cuda")).exists()
    with pytest.raises(SystemExit):
        cli.main([*run, "gpu"])
    assert "unknown device: 'gpu'; run castiron devices" in capsys.readouterr().err
