"""`castiron plan`: its arithmetic on fixed figures, and what it calculates of machines that are described."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from castiron.pipelines import cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring.call_times import SHARES, Limits, calculated, seconds, state_bytes
from castiron.pipelines.measuring.plan import Times, batch_rate, full, load, machines, most, played
from castiron.vmfb.states import State
from tests.pipelines import served

TIMES = Times(steps={1: 0.010, 4: 0.020, 8: 0.030}, alone=0.5, chunk=0.05, chunks=16, generated=128)


def test_fixed_figures():
    # Of 8 slots one in nine reads: 128 turns of 144 are steps.
    assert full(TIMES, 8) == pytest.approx(64 / 9) and TIMES.step(64 / 9) == pytest.approx(0.02 + 0.01 * 28 / 36)
    assert most(TIMES, 8) == pytest.approx(1 / (16 * 0.05 + 128 * 0.0277777 / 7.1111), rel=1e-4)
    assert batch_rate(TIMES, 8) == pytest.approx(1 / (0.5 + 128 * 0.03 / 8))
    assert [machines(TIMES, 8, rate, 0.8) for rate in (0.1, 5, 5 * 1.6)] == [1, 9, 13]
    one = load(TIMES, 8, 5 / 9)
    assert one.busy == pytest.approx(5 / 9 / most(TIMES, 8)) and one.busy < 0.8
    # Reading holds it back where answers are short: as many decode as come out of it.
    short = Times(TIMES.steps, 0.5, 0.05, 16, 8)
    assert full(short, 8) == 0.5 and most(short, 8) == pytest.approx(1 / (16 * 0.05 + 8 * 0.01))
    assert most(TIMES, 1) == pytest.approx(1 / (0.5 + 128 * 0.01)) == pytest.approx(played(TIMES, 1, 1e9).rate, rel=0.01)
    assert load(TIMES, 8, 1.0).first == float("inf")


@pytest.mark.parametrize("times", [TIMES, Times({1: 0.004, 4: 0.008, 8: 0.014}, 0.06, 0.02, 4, 64)])
def test_between_an_idle_machine_and_a_full_one(times):
    """Played through, a machine is at its ends what the formulas say, and slower the busier it is."""
    loads = [load(times, 8, busy * most(times, 8)) for busy in (0.001, 0.2, 0.4, 0.6, 0.8, 0.95)]
    assert loads[0].first == pytest.approx(times.alone, rel=0.02) and loads[0].token == pytest.approx(times.step(1), rel=0.02)
    for one, other in zip(loads, loads[1:]):
        assert one.first < other.first and one.token < other.token and one.active < other.active
    # As many requests at once as any time: what is left is what one machine answers.
    assert played(times, 8, 1e9).rate == pytest.approx(most(times, 8), rel=0.02)
    # By Little's law.
    assert loads[3].active == pytest.approx(0.6 * most(times, 8) * (times.generated - 1) * loads[3].token, rel=0.1)


def test_two_requests_by_hand(monkeypatch):
    """One arrives at 1 s, the other while it decodes."""
    ticks = iter([1.0, 0.515])
    monkeypatch.setattr("random.Random.expovariate", lambda *_: next(ticks))
    times = Times({1: 0.01, 2: 0.02}, alone=0.5, chunk=0.1, chunks=2, generated=5)
    # Read by 1.5; tokens at 1.51 and 1.52. The other's chunks end at 1.62 and 1.73, with tokens at 1.63 and 1.74: the first is
    # done then, and the other has four more steps alone.
    found = played(times, 2, 1.0, 2)
    assert found.first == pytest.approx((0.5 + 0.215) / 2) and found.token == pytest.approx((0.24 / 4 + 0.05 / 4) / 2)
    assert found.rate == pytest.approx(2 / 1.78) and found.active == pytest.approx(8 / 1.78 * found.token)


MANIFEST = SimpleNamespace(
    context=100,
    prefill_widths=(8, 32),
    widths=lambda role: (4,) if role == "batch" else (),
    compile={
        "work": {
            "decode_step": {"a": {"calls": 2, "bytes": [4_000, 10, 9_000], "flops": [1_000, 0, 1_000]}},
            "prefill_8": {"a": {"calls": 1, "bytes": [8_000, 0, 8_000], "flops": [40_000, 100, 90_000]}},
            "prefill_32": {"a": {"calls": 1, "bytes": [8_000, 0, 8_000], "flops": [160_000, 0, 160_000]}},
            "decode_batch_4": {"a": {"calls": 2, "bytes": [4_000, 0, 4_000], "flops": [16_000, 0, 16_000]}},
        }
    },
)  # fmt: skip


def test_another_machine_is_what_the_kernels_do_over_what_it_can():
    limits = Limits(read_gb_s=1.0, gflop_s=2.0)
    assert seconds(MANIFEST, "decode_step", 50, limits) == pytest.approx(2 * 4_500e-9)
    found = calculated(MANIFEST, 40, 20, limits, {"decode": 0.5, "batch": 0.25, "prefill": 1.0})
    assert found.steps == {1: pytest.approx(2 * 9_000e-9), 4: pytest.approx(4 * 16_000e-9)}
    # 32 tokens and then 8 at position 32, of which each is held back by what it computes.
    assert found.alone == pytest.approx(80e-6 + 43_200 / 2e9) and (found.chunks, found.generated) == (2, 20)
    with pytest.raises(PipelineError, match="does not fit"):
        calculated(MANIFEST, 90, 20, limits)
    with pytest.raises(PipelineError, match="does not say"):
        seconds(MANIFEST, "decode_batch_8", 0, limits)
    states = (State("k", (2, 100, 5), "f16", "positional"), State("r", (2, 7), "f32", "recurrent"))
    assert state_bytes(SimpleNamespace(states=states), 25) == 2 * 25 * 5 * 2 + 2 * 7 * 4


def test_the_command(tmp_path_factory, capsys, monkeypatch):
    monkeypatch.setattr("castiron.pipelines.measuring.call_times.SECONDS", 0.01)
    path = str(served.bundle(tmp_path_factory.getbasetemp()))

    def plan(*options: str) -> dict:
        assert cli.main(["plan", path, "--threads", "1", "--prompt", "60", "--gen", "20", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    here = plan("--rate", "50")
    assert here["measured"] and here["slots"] == served.SLOTS and here["decode_tok_s"].keys() >= {"1", "4"}
    assert here["memory"]["total"] == here["memory"]["weights"] + served.SLOTS * here["memory"]["state"] and here["busy"] <= 0.8
    check = plan("--rate", "50", "--check", "0.1")["check"]
    assert all(value > 0 for value in check.values()) and len(check) == 6
    other = plan("--rate", "1e6", "--bandwidth", "400", "--flops", "4000", "--memory", "0.0006")
    # A tenth of a megabyte is left for requests of 80 of 126 positions.
    assert not other["measured"] and 1 <= other["slots"] < served.SLOTS and other["machines"] > 5
    # The fewest of which none is busier than that.
    assert other["busy"] <= 0.8 and 0.8 * other["most_per_s"] * (other["machines"] - 1) < 1e6
    assert (
        cli.main(
            ["plan", path, "--rate", "5", "--prompt", "60", "--gen", "20", "--cores", "4", "--flops", "50", "--bandwidth", "9"]
        )
        == 0
    )
    assert "a calculation" in capsys.readouterr().out
    for options, why in (
        (["--prompt", "100", "--gen", "50"], "does not fit"),
        (["--memory", "0.0001", "--flops", "9", "--bandwidth", "9"], "more memory"),
        (["--busiest", "1"], "--busiest is 1"),
        (["--rate", "0"], "--rate is 0"),
        (["--rate", "1e9", "--flops", "1e-6", "--bandwidth", "1e-6"], "more than 1,000,000,000 such machines"),
        (["--memory", "1e300"], "--memory is 1e+300; give a number from 1e-06 to 1e+09"),
        (["--check", "1"], "give one"),
        (["--check", "1", "--rate", "5", "--flops", "9"], "describe no other machine"),
    ):
        assert cli.main(["plan", path, "--prompt", "60", "--gen", "20", *options]) == 1
        assert why in capsys.readouterr().err


PAGE = (Path(__file__).parents[2] / "docs/batch.md").read_text()


def test_the_calculation_of_the_page():
    """A model of 70 B parameters on a server of 64 cores, from the numbers that the page begins with."""
    matrices, layers, heads, dim = 69.5e9, 80, 8, 128
    weights, cache = matrices * 4.5 / 8, layers * 2 * heads * dim * 2
    read, peak = 380e9, 6.3e12
    flop = 2 * matrices

    def call(tokens: int, kind: str) -> float:
        return max(weights / read, tokens * flop / peak) / SHARES[kind]

    times = Times(
        {1: call(1, "decode"), 4: call(4, "batch"), 8: call(8, "batch")}, 4 * call(128, "prefill"), call(32, "prefill"), 16, 128
    )
    count = machines(times, 8, 20, 0.8)
    one = load(times, 8, 20 / count)
    numbers = [
        f"{weights / 1e9:.1f} GB", f"{cache:,} bytes", f"{640 * cache / 1e6:.0f} MB", f"{(weights + 8 * 640 * cache) / 1e9:.1f} GB",
        f"{times.steps[1] * 1e3:.0f} ms a token", f"{times.steps[8] * 1e3:.0f} ms a step, {8 / times.steps[8]:.0f} tok/s",
        f"{times.alone:.1f} s", f"{most(times, 8):.4f}", f"{count} servers, each {one.busy:.0%} busy",
        f"{one.first:.0f} s", f"{one.token:.2f} s a token", f"{batch_rate(times, 8) * 3600:.0f} rows an hour",
    ]  # fmt: skip
    section = PAGE[PAGE.index("### 70 B") :]
    assert [number for number in numbers if number not in section] == []
