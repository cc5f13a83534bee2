"""bench --kernel: that the kernel which is timed does its work, and what is made of its time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from castiron.emitter.kernels.weights.packing import unpack
from castiron.pipelines import cli
from castiron.pipelines.casting.named_kernel import KINDS
from castiron.pipelines.measuring import bench_kernel
from castiron.pipelines.measuring.kernel_times import bound_of
from tests.pipelines.test_bench import FixedMachine
from tests.pipelines.test_cli import complaint
from tests.pipelines.toy_text import read_json

SHAPES = {
    "experts": "4x32x64",
    "embed": "512x64",
    "argmax": "512",
    "rms_norm": "64",
    "layer_norm": "64",
    "round_x": "64",
    "split_x": "64",
    "causal_conv": "64x4",
    "gated_delta": "1x2x16x16",
    "selective_scan": "1x2x16x16",
}
CODECS = {"round_x": "q4_1", "gemv": "q4_k", "gemm_few": "q6_k", "gemm": "q8_0", "experts": "q4_0", "embed": "q4_1"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr("castiron.pipelines.measuring.machine.Machine", FixedMachine)
    monkeypatch.setattr(bench_kernel, "LOAD_SECONDS", 0.01)
    monkeypatch.setattr(bench_kernel, "STREAMED_BYTES", 1 << 20)


def shape_of(kind: str) -> str:
    product = "64x256" if KINDS[kind].is_product else "2x1x32"
    return SHAPES.get(kind, product)


def timed(kind: str, codec: str, numerics: str = "exact", context: int = 160, cache: str = "f32"):
    """What is timed, the values that it runs on, and its results after a round."""
    asked = bench_kernel.ask(kind, shape_of(kind), None, codec, numerics, 1, context, cache)
    sizes = [int(word) for word in shape_of(kind).split("x")]
    given = bench_kernel.operands(asked.kernel, codec, sizes, asked.settings["tokens"], asked.position)
    runs = bench_kernel.Timed(asked.kernel, given, 1)
    seconds, calls = runs.seconds(0.001)
    assert seconds > 0 and calls > 0
    names = [name for name in asked.kernel.results if name not in asked.kernel.in_place]
    return asked, given, dict(zip(names, (place.array for place in runs._kept[0]), strict=True))


@pytest.mark.parametrize(("kind", "cache"), [(kind, "f32") for kind in KINDS] + [("attention_decode", "q8_0")])
def test_what_is_timed_is_the_kernel_on_operands_that_are_whole(kind, cache):
    asked, given, found = timed(kind, CODECS.get(kind, "f32"), cache=cache)
    indices = dict.fromkeys(asked.kernel.indices, 0)
    want = asked.kernel.reference(**{name: value.copy() for name, value in given.items()}, **indices)
    for name, array in found.items():
        # What a kernel keeps for itself between its parts is nobody's, and what a state gives depends on how often it was run.
        if name != "parts":
            if "state" not in asked.kernel.in_place:
                np.testing.assert_allclose(array, want[name], rtol=1e-3, atol=1e-3)
            assert np.isfinite(array).all() and array.any()


def test_weights_are_as_trained_ones_and_come_in_turn(monkeypatch):
    monkeypatch.setattr(bench_kernel, "STREAMED_BYTES", 100_000)
    asked = bench_kernel.ask("gemv", "64x256", None, "q4_k", "exact", 1, 64)
    given = bench_kernel.operands(asked.kernel, "q4_k", [64, 256], 1, 0)
    weights = unpack("q4_k", given["weight"].view(np.uint8), 64, 256)
    assert np.isfinite(weights).all() and 0.01 < weights.std() < 0.2
    runs = bench_kernel.Timed(asked.kernel, given, 1)
    assert len(runs._arguments) == 100_000 // given["weight"].nbytes
    # The small operand is one for all.
    places = (
        {copy["weight"].array.ctypes.data for copy in runs._kept[2:]},
        {copy["x"].array.ctypes.data for copy in runs._kept[2:]},
    )
    assert list(map(len, places)) == [len(runs._arguments), 1]


def test_bytes_are_another_kernel_of_the_same_work():
    exact, _, _ = timed("gemm", "q4_0")
    fast, _, found = timed("gemm", "q4_0", "fast")
    assert exact.kernel.name != fast.kernel.name and exact.kernel.work(0)[0] == fast.kernel.work(0)[0]
    assert np.isfinite(found["y"]).all()


def test_a_cache_is_full():
    asked, given, _ = timed("attention_decode", "f32", context=50)
    assert given["position"] == asked.position == 49
    asked, given, _ = timed("attention_prefill", "f32", context=160)
    assert given["start"] == asked.position == 32 and given["length"] == 128


def test_the_object_and_the_table_state_limits_as_explain_does(tmp_path, capsys):
    saved = tmp_path / "kernel.json"
    argv = ["bench", "--kernel", "gemv", "--codec", "q4_k", "--shape", "64x256", "--threads", "1", "--rounds", "2"]
    assert cli.main([*argv, "--save", str(saved), "--json"]) == 0
    result = read_json(capsys.readouterr().out)
    assert json.loads(saved.read_text()) == result
    assert set(result) == {"kernel", "us", "besides_us", "calls", "bytes", "flops", "gb_s", "gflop_s", "bound", "limit_share",
                           "runs", "machine", "settings"}  # fmt: skip
    assert result["flops"] == 2 * 64 * 256 and len(result["runs"]["us"]["values"]) == 2
    assert result["settings"] | {"isa": ""} == {
        "kernel": "gemv", "shape": "64x256", "tokens": 1, "codec": "q4_k", "numerics": "exact", "isa": "", "threads": 1,
        "context": 4096, "cache": "f32", "rounds": 2,
    }  # fmt: skip
    assert result["machine"]["read_gb_s"] == 10 and result["machine"]["peak_gflop_s"] == 100
    assert cli.main([*argv, "--baseline", str(saved)]) == 0
    out = capsys.readouterr().out
    assert "us a call" in out and "GFLOP/s" in out and f"against {saved}:\n  gemv " in out


def test_bounds():
    limits = {"read_gb_s": 10.0, "peak_gflop_s": 100.0}
    assert bound_of("gemm", 1e9, 1e9, 0.2, limits) == ("memory", 0.5)
    assert bound_of("gemm", 1e9, 1e9, 0.05, limits) == ("cache", None)
    assert bound_of("gemm", 1e8, 1e10, 0.05, limits) == ("compute", 2.0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kernel", "gem", "--shape", "4x4"], "kernel 'gem' is not one of gemv"),
        (["--kernel", "gemm", "--shape", "4"], "--shape takes OUTxIN"),
        (["--kernel", "gemm", "--shape", "4x100", "--codec", "q4_k"], "it takes a multiple of 256"),
        (["--kernel", "gemv", "--shape", "4x256", "--codec", "q4_k", "--numerics", "fast"], "rounds x for 1 tokens"),
        (
            ["--kernel", "gemm", "--shape", "4x256", "--numerics", "bytes"],
            "numerics 'bytes' are unknown: use exact, canonical, fast",
        ),
        (["--kernel", "argmax", "--shape", "64", "--numerics", "fast"], "argmax is no product"),
        (["--kernel", "gemm", "--shape", "4x256", "--tokens", "2"], "does not take 2 tokens"),
        (["--kernel", "gemm", "--shape", "4x256", "--against", "hf"], "leave --against out"),
        (["--kernel", "gemm", "--shape", "4x256", "--rounds", "0"], "--rounds is 0"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(options, says, capsys):
    assert cli.main(["bench", *options]) == 1
    assert says in complaint(capsys)
