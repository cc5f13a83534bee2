"""Test castiron bench --kernel: the timed kernel does its work, and its time becomes rates."""

from __future__ import annotations

import json

import numpy as np
import pytest

from castiron.emitter.kernels.weights.packing import unpack
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.named_kernel import KINDS
from castiron.pipelines.evaluate import bench_kernel, machine
from castiron.pipelines.evaluate.machine import TimedKernel, peak_of
from tests.cli.test_cli import complaint
from tests.evaluate.test_bench import FixedMachine
from tests.support.toy_text import read_json

SHAPES = {
    "experts": "4x32x64",
    "embed": "512x64",
    "argmax": "512",
    "rms_norm": "64",
    "layer_norm": "64",
    "quantise_x": "64",
    "split_x": "64",
    "causal_conv": "64x4",
    "gated_delta": "1x2x16x16",
    "selective_scan": "1x2x16x16",
}
CODECS = {"quantise_x": "q4_1", "gemv": "q4_k", "gemm_few": "q6_k", "gemm": "q8_0", "experts": "q4_0", "embed": "q4_1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("castiron.pipelines.evaluate.machine.Machine", FixedMachine)
    monkeypatch.setattr(bench_kernel, "LOAD_SECONDS", 0.01)
    monkeypatch.setattr(machine, "STREAMED_BYTES", 1 << 20)


def shape_of(kind: str) -> str:
    matmul = "64x256" if KINDS[kind].shape == "OUTxIN" else "2x1x32"
    return SHAPES.get(kind, matmul)


def timed(kind: str, codec: str, numerics: str = "exact", context: int = 160, cache: str = "f32"):
    """Time a kernel; return its KernelRun, its operands, and its results."""
    asked = bench_kernel.kernel_run(kind, shape_of(kind), None, codec, numerics, 1, context, cache)
    sizes = [int(word) for word in shape_of(kind).split("x")]
    given = bench_kernel.operands(asked.kernel, codec, sizes, asked.settings["tokens"], asked.position)
    runs = TimedKernel(asked.kernel, given, 1)
    seconds, calls = runs.seconds(0.001)
    assert seconds > 0 and calls > 0
    return asked, given, runs.results


@pytest.mark.parametrize(("kind", "cache"), [(kind, "f32") for kind in KINDS] + [("attention_decode", "q8_0")])
def test_times_the_kernel_on_complete_operands(kind, cache):
    asked, given, found = timed(kind, CODECS.get(kind, "f32"), cache=cache)
    indices = dict.fromkeys(asked.kernel.indices, 0)
    want = asked.kernel.reference(**{name: value.copy() for name, value in given.items()}, **indices)
    for name, array in found.items():
        # `parts` and `merged` are scratch memory, and a state depends on the number of calls.
        if name not in ("parts", "merged"):
            if "state" not in asked.kernel.in_place:
                np.testing.assert_allclose(array, want[name], rtol=1e-3, atol=1e-3)
            assert np.isfinite(array).all() and array.any()


def test_calls_take_weights_like_trained_ones_in_turn(monkeypatch):
    monkeypatch.setattr(machine, "STREAMED_BYTES", 100_000)
    asked = bench_kernel.kernel_run("gemv", "64x256", None, "q4_k", "exact", 1, 64)
    given = bench_kernel.operands(asked.kernel, "q4_k", [64, 256], 1, 0)
    weights = unpack("q4_k", given["weight"].view(np.uint8), 64, 256)
    assert np.isfinite(weights).all() and 0.01 < weights.std() < 0.2
    copies = TimedKernel(asked.kernel, given, 1).copies
    assert len(copies) == 100_000 // given["weight"].nbytes
    # All calls share the small operand.
    assert [len({copy[name].ctypes.data for copy in copies}) for name in ("weight", "x")] == [len(copies), 1]


def test_numerics_and_the_position_are_those_of_the_options():
    exact, _, _ = timed("gemm", "q4_0")
    fast, _, found = timed("gemm", "q4_0", "fast")
    assert exact.kernel.name != fast.kernel.name and exact.kernel.work(0)[0] == fast.kernel.work(0)[0]
    assert np.isfinite(found["y"]).all()
    # The cache is full after the call.
    asked, given, _ = timed("attention_decode", "f32", context=50)
    assert given["position"] == asked.position == 49
    asked, given, _ = timed("attention_prefill", "f32", context=160)
    assert given["start"] == asked.position == 32 and given["length"] == 128


def test_the_json_object_has_its_documented_fields(tmp_path, capsys):
    saved = tmp_path / "kernel.json"
    argv = ["bench", "--kernel", "gemv", "--codec", "q4_k", "--shape", "64x256", "--threads", "1", "--rounds", "2"]
    peak = peak_of(bench_kernel.kernel_run("gemv", "64x256", None, "q4_k", "exact", 1, 4096).kernel.name)
    assert cli.main([*argv, "--output", str(saved), "--json"]) == 0
    result = read_json(capsys.readouterr().out)
    assert json.loads(saved.read_text()) == result
    assert set(result) == {"kernel", "us", "overhead_us", "calls", "bytes", "flops", "gb_s", "gflop_s", "bound", "limit_share",
                           "runs", "machine", "settings", "busy"}  # fmt: skip
    assert result["flops"] == 2 * 64 * 256 and len(result["runs"]["us"]["values"]) == 2
    assert result["settings"] | {"isa": ""} == {
        "kernel": "gemv", "shape": "64x256", "tokens": 1, "codec": "q4_k", "numerics": "exact", "isa": "", "threads": 1,
        "context": 4096, "kv_cache_type": "f32", "rounds": 2,
    }  # fmt: skip
    assert result["machine"]["read_gb_s"] == 10 and result["machine"][peak] in (100, 400)
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    assert "us a call" in out and "GFLOP/s" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernel", "gem", "--shape", "4x4"], "unknown kernel: 'gem'; use one of gemv"),
        (["--kernel", "gemm", "--shape", "4"], "--shape takes OUTxIN"),
        (["--kernel", "gemm", "--shape", "4x100", "--codec", "q4_k"], "use a multiple of 256"),
        (["--kernel", "gemv", "--shape", "4x256", "--codec", "q4_k", "--numerics", "fast"], "no kernel on"),
        (["--kernel", "argmax", "--shape", "64", "--numerics", "fast"], "argmax is not a matmul"),
        (["--kernel", "gemm", "--shape", "4x256", "--tokens", "2"], "does not take 2 tokens"),
        (["--kernel", "gemm", "--shape", "4x256", "--against", "hf"], "--against does not apply to a kernel"),
        (["--kernel", "gemm", "--shape", "4x256", "--rounds", "0"], "--rounds is 0"),
    ],
)
def test_rejects_arguments_that_do_not_fit(options, message, capsys):
    assert cli.main(["bench", *options]) == 1
    assert message in complaint(capsys)
