"""The choice of a device, its errors, and the known answer that it must reproduce."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.evaluate import random_checkpoint
from castiron.reference.tiny import tiny_model
from castiron.vmfb import targets
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.device import gpu_program, gpus
from castiron.vmfb.device.gpus import DeviceError, devices_of
from castiron.vmfb.device.open_program import open_program
from castiron.vmfb.device.program import SessionError
from castiron.vmfb.device.upload import Upload
from castiron.vmfb.run.session import Session
from tests.gpu import measure

OPTIONS = {"context": 32, "prefill": (8,), "batch": (), "verify_widths": ()}
# Rows of a complete block of every codec.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}


@pytest.fixture
def gpu(compiled):
    return compiled("llama", **OPTIONS).gpu


def test_devices_lists_the_cpu_and_llvmpipe(llvmpipe, capsys):
    assert cli.main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    by_id = {device["id"]: device for device in found["devices"]}
    assert by_id["cpu"]["target"] == "host" and by_id["cpu"]["memory"] > 0
    assert "llvmpipe" in by_id[llvmpipe]["name"] and by_id[llvmpipe]["memory"] > 0
    assert "Mesa" in by_id[llvmpipe]["version"] and "shaderFloat16" in by_id[llvmpipe]["features"]
    assert by_id[llvmpipe]["target"] == "vulkan"
    assert cli.main(["devices"]) == 0
    assert llvmpipe in capsys.readouterr().out


def test_the_device_of_a_bundle_can_be_chosen(gpu, llvmpipe, capsys):
    run = ["run", str(gpu.path), "--tokens", "5,6,7", "-n", "3", "--ignore-eos", "--json"]
    assert cli.main(run) == 0
    wanted = json.loads(capsys.readouterr().out)["tokens"]
    assert cli.main([*run, "--device", llvmpipe]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == wanted
    for name, message in (
        ("vulkan:9", "unknown device: vulkan:9; choose one of vulkan:0"),
        ("cuda:0", "bundle is compiled for vulkan and cannot run on cuda:0"),
        ("cpu", "bundle is compiled for vulkan and cannot run on cpu"),
    ):
        assert cli.main([*run, "--device", name]) == 1
        assert message in capsys.readouterr().err


def test_a_missing_driver_is_one_line(gpu, monkeypatch, capsys):
    monkeypatch.setattr(gpus, "create_hal_driver", lambda name: (_ for _ in ()).throw(RuntimeError("NOT_FOUND; no libvulkan")))
    assert cli.main(["run", str(gpu.path), "--tokens", "5", "-n", "1"]) == 1
    error = capsys.readouterr().err
    assert "cannot use vulkan (no libvulkan); it needs the Vulkan loader" in error and error.count("\n") == 1


def test_too_little_memory_is_reported_before_the_upload(gpu, monkeypatch):
    (info, *_) = devices_of("vulkan")
    monkeypatch.setattr(gpu_program, "find_device", lambda driver, chosen: replace(info, memory=100_000))
    monkeypatch.setattr(gpu_program, "Upload", None)
    with pytest.raises(DeviceError, match=r"too little memory on vulkan:0 .*: 0\.00 GB, but the model needs"):
        Session(gpu)


def test_failures_of_the_device_are_one_line(gpu, monkeypatch):
    program = open_program(gpu)
    with pytest.raises(DeviceError, match=r"cannot allocate 10000\.00 GB on vulkan:0 \(.*\); use a smaller model"):
        program.state((10**10, 250), "f32")
    state = program.state((4, 4), "f32")
    with pytest.raises(SessionError, match="the GPU failed in transfer_fill"):
        program.transfer.fill(state.view, 0, 2**20)

    def fail(**_):
        raise RuntimeError("RESOURCE_EXHAUSTED; no memory")

    full = SimpleNamespace(allocator=SimpleNamespace(allocate_buffer_copy=fail))
    monkeypatch.setattr(gpu_program, "Upload", lambda info, device, *given: Upload(info, full, *given))
    with pytest.raises(DeviceError, match=r"cannot allocate 0\.00 GB on vulkan:0 \(no memory\); use a smaller model"):
        Session(gpu)


def test_the_benchmark_for_gpus_runs(llvmpipe, own_cache, tmp_path, monkeypatch):
    config = {"model_type": "llama", "vocab_size": 128, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
              "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
              "max_position_embeddings": 64, "tie_word_embeddings": True}  # fmt: skip
    monkeypatch.setitem(measure.SHAPES, "tiny", config)
    monkeypatch.setitem(random_checkpoint.SHAPES, "tiny", config)
    for name, value in {"PROMPT": 8, "STEPS": 2, "SLOTS": 2, "CONTEXT": 32, "FOLDER": tmp_path}.items():
        monkeypatch.setattr(measure, name, value)
    found = measure.measure("tiny", "vulkan", "an L4")
    assert found["decode_2_tok_s"] > 0 and found["prefill_share_of_bf16_peak"] > 0


def test_all_modules_share_the_uploaded_weights(gpu):
    seen: list[tuple[int, int]] = []
    session = Session(gpu.on_device(None, lambda done, total: seen.append((done, total))))
    assert len(session.program.contexts) > 1
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1][0] == seen[-1][1] == seen[0][1]


def test_the_known_answer_is_checked_again_after_a_driver_update(gpu, own_cache, monkeypatch):
    checks = []
    check = gpu_program.find_difference
    monkeypatch.setattr(gpu_program, "find_difference", lambda *given: checks.append(given) or check(*given))
    for expected in (1, 1):
        Session(gpu)
        assert len(checks) == expected
    (info, *_) = devices_of("vulkan")
    monkeypatch.setattr(gpu_program, "find_device", lambda *_: replace(info, version="another"))
    Session(gpu)
    assert len(checks) == 2


@pytest.mark.parametrize("weights", ["q8_0", "q4_k"])
def test_the_default_spirv_features_are_refused(weights, tmp_path, own_cache, monkeypatch):
    """With IREE's default target for Vulkan, StableHLO reads f16 wrongly, without an error."""
    checkpoint = tiny_model("llama", tmp_path / "checkpoint", **WIDE)
    options = Options(target="vulkan", lowering="portable", weights=weights, **OPTIONS)
    Session(compile_model(checkpoint, tmp_path / "right", options).bundle)
    monkeypatch.setattr(targets, "_SPIRV_FEATURES", ())
    wrong = compile_model(checkpoint, tmp_path / "wrong", options).bundle
    with pytest.raises(
        DeviceError, match=rf"computes wrong results: a matmul with {weights} weights gives \S+ instead of \S+; "
    ):
        Session(wrong)


def test_a_wrong_decode_is_refused(gpu, own_cache):
    answer = gpu.manifest.known_answer
    rows = [list(row) for row in answer.decode.logits]
    rows[2][1] += 0.1
    changed = replace(answer, decode=replace(answer.decode, logits=tuple(map(tuple, rows))))
    bundle = replace(open_bundle(gpu.path), manifest=replace(gpu.manifest, known_answer=changed))
    with pytest.raises(DeviceError, match="decode_step at position 2 gives"):
        Session(bundle)
