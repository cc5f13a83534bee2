"""Test the table of castiron explain."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from castiron.pipelines.cli import explain as explaining
from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli.explain import (
    REST,
    WIDTH,
    described,
    explain,
    kernel_row,
    of_limit,
    table,
)
from castiron.pipelines.evaluate import bench_kernel
from castiron.pipelines.evaluate.bench import limited
from castiron.pipelines.evaluate.machine import ATTEMPTS, busy_signs
from castiron.vmfb.device.profile import Dispatch, Profile
from tests.evaluate.test_bench import FixedMachine

LIMITS = {
    "read_gb_s": 10.0,
    "peak_gflop_s": 100.0,
    "peak_bytes_gop_s": 400.0,
    "peak_pairs_gflop_s": 200.0,
    "peak_matrix_gflop_s": 1600.0,
}
LONG = "gemv_q4_1_1536x576_rms9p99999975em06_silu_avx512_w2b2c4a16u4_and_much_more_that_makes_it_longer_than_a_line_is"


def row(seconds: float, nbytes: int, flops: int, name: str = "k", calls: int = 2, paths=("model.layers.*.mlp",)) -> dict:
    """Return the row of a kernel whose calls together take `seconds` and do this work."""
    work = {"paths": list(paths), "calls": calls, "bytes": [nbytes // calls, 0, 0], "flops": [flops // calls, 0, 0]}
    return kernel_row(Dispatch(f"{name}_fn", calls, seconds, 1), {name: work}, 0, LIMITS)


def result(*rows: dict, call_ms: float) -> dict:
    return described(Profile("decode_step", 7, 2, call_ms / 1e3, ()), list(rows), LIMITS)


ROWS = (
    row(4e-3, 30_000_000, 60_000_000, LONG),
    row(2e-3, 20_000, 180_000_000, "attention", paths=("model.layers.*.self_attn",)),
    row(1e-3, 21_800_000, 1_000_000, "norm", calls=4, paths=("model.layers.*.a_norm", "model.layers.*.b_norm" + "m" * 40)),
    row(5e-4, 1_000, 1_000, "argmax", calls=1, paths=("output",)),
    kernel_row(Dispatch("decode_step_dispatch_1", 1, 1e-4, 1), {}, 0, LIMITS),
)
CALL = result(*ROWS, call_ms=10.0)


@pytest.mark.parametrize(
    ("seconds", "nbytes", "flops", "bound", "share", "words"),
    [
        (4e-3, 30_000_000, 60_000_000, "memory", 0.75, "75%"),
        (2e-3, 20_000, 100_000_000, "compute", 0.5, "50%"),
        # Memory would need 2.18 ms for the bytes read in 1 ms.
        (1e-3, 21_800_000, 1_000_000, "cache", None, "in cache"),
        # Faster than the measured peak, at a higher clock rate.
        (1e-3, 1_000, 120_000_000, "compute", 1.0, "100%"),
    ],
)
def test_the_share_is_of_the_bound_and_at_most_one(seconds, nbytes, flops, bound, share, words):
    found = row(seconds, nbytes, flops)
    assert found["bound"] == bound and found["limit_share"] == (share if share is None else pytest.approx(share))
    assert of_limit(found) == words


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("gemm_q4_1_128x960x576_int8_avx512vnni_r6w2", 0.5),
        ("gemm_bf16_128x960x576_bf16_pairs_avx512bf16_r8w2", 1.0),
        ("gemm_bf16_128x960x576_bf16_matrix_silu_amx_r16h2", 0.125),
        ("gemm_q4_1_128x960x576_bf16_split_amx_r16h2", 0.125),
    ],
)
def test_a_kernel_of_rounded_activations_has_the_limit_of_its_unit(name, share):
    assert row(1e-3, 1_000, 200_000_000, name)["limit_share"] == pytest.approx(share)
    assert "100 GFLOP/s (f32), 400 (bytes), 200 (bf16), 1600 (tiles)" in "\n".join(table(CALL))


def test_the_calls_share_of_the_peak_counts_all_arithmetic():
    assert CALL["peak_share"] == pytest.approx((60e6 + 180e6 + 1e6 + 1e3) / 10e-3 / 100e9)
    assert "the call takes 24%" in "\n".join(table(CALL))
    # The manifest does not describe the last kernel.
    assert ROWS[-1]["bound"] is None and of_limit(ROWS[-1]) == "?"


def test_the_table_fits_and_its_shares_sum_to_100_percent():
    lines = table(CALL)
    assert max(map(len, lines)) <= WIDTH == 100
    shares = [float(found[1]) for line in lines if (found := re.match(r" *\d+\.\d{3} +(\d+\.\d)%", line))]
    assert len(shares) == len(ROWS) + 1 and sum(shares) == pytest.approx(100, abs=0.5)
    assert lines[-1].endswith(REST) and re.match(r" +2\.400 +24\.0% ", lines[-1])
    # Kernels are timed in other calls, and may take longer than this one.
    more = result(*ROWS, call_ms=5.0)
    assert more["rest_ms"] == 0 and re.match(r" +0\.000 +0\.0% ", table(more)[-1])


def test_signs_of_other_programs():
    """Figures that vary, and shares that no program can reach."""
    assert busy_signs({"read_gb_s": [10, 12], "ms": [1.0, 1.2]}, {"peak": 1.0, "unknown": None}) == []
    assert busy_signs({"read_gb_s": [10, 30.123], "ms": [1, 1]}, {"peak": 1.64}) == ["read_gb_s 10 to 30.1", "peak 164%"]


@pytest.fixture
def measured(monkeypatch):
    """Return a function that sets the (call, kernel) seconds of profiles, and counts unused."""
    work = {"decode_step": {"k": {"calls": 1, "bytes": [1, 0, 1], "flops": [10**8, 0, 10**8], "paths": []}}}
    manifest = SimpleNamespace(functions=[SimpleNamespace(name="decode_step", role="decode", width=1)], context=64,
                               compile={"work": work})  # fmt: skip
    monkeypatch.setattr(explaining, "Machine", FixedMachine)

    def set_times(*times):
        left = iter(times)

        def profile(*_, **__):
            call, kernel = next(left)
            return Profile("decode_step", 1, 1, call, (Dispatch("k_fn", 1, kernel, 1),))

        monkeypatch.setattr(explaining, "profile", profile)
        return explain(SimpleNamespace(manifest=manifest), "decode_step", 1, 1), len(list(left))

    return set_times


def test_figures_that_contradict_each_other_are_measured_again(measured):
    steady, slow, uneven = [(0.01, 0.008)] * 3, [(0.056, 0.086)] * 3, [(0.01, 0.008), (0.01, 0.008), (0.02, 0.008)]
    assert measured(*steady, *slow)[0]["busy"] == [] and measured(*steady, *slow)[1] == 3
    for disturbed in (slow, uneven):
        found, left = measured(*disturbed, *steady)
        assert found["busy"] == [] and left == 0 and found["call_ms"] == pytest.approx(10)
    found, _ = measured(*slow * ATTEMPTS)
    assert found["busy"] == ["kernels of the call 154%"]
    assert measured(*uneven * ATTEMPTS)[0]["busy"] == ["call ms 10 to 20"]
    # 0.1 GFLOP of 100 GFLOP/s in less than a millisecond.
    assert measured(*[(0.0005, 0.0005)] * 9)[0]["busy"] == ["arithmetic of the peak 200%"]


def test_explain_and_bench_report_a_busy_machine(monkeypatch, capsys):
    signs = {"busy": ["call ms 10 to 20"]}
    monkeypatch.setattr(explaining, "open_bundle", lambda _: None)
    monkeypatch.setattr(
        explaining,
        "require_cpu",
        lambda *_: SimpleNamespace(with_context=lambda _: None, manifest=SimpleNamespace(max_context=9)),
    )
    monkeypatch.setattr(explaining, "explain", lambda *_: signs)
    monkeypatch.setattr(bench_kernel, "kernel_run", lambda *_: None)
    monkeypatch.setattr(bench_kernel, "measure", lambda *_: signs)
    monkeypatch.setattr("castiron.pipelines.evaluate.machine.Machine", FixedMachine)
    for argv in (["explain", "."], ["bench", "--kernel", "gemv", "--shape", "16x16", "--rounds", "1"]):
        assert cli.main([*argv, "--json"]) == 0
        message = capsys.readouterr().err
        assert message == "castiron: other programs ran during the measurement: call ms 10 to 20; end them and measure again\n"


def test_only_shares_that_have_a_limit_are_signs():
    """Int8 kernels exceed the f32 peak, and small weights are read from the CPU's cache."""
    shares = {"decode_roofline": 1.3, "prefill_peak_share": 1.64}
    manifest = lambda kernel, size: SimpleNamespace(
        compile={"work": {"prefill_8": {kernel: {}}}}, files={"weights.irpa": SimpleNamespace(size=size)}
    )
    assert list(limited(manifest("gemm_f32", 10**10), shares).values()) == [1.3, 1.64]
    assert list(limited(manifest("gemm_int8_q4", 10**8), shares).values()) == [None, None]
