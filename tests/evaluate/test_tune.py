"""Test castiron tune: its candidates, the tiles that it stores, and that it drops wrong kernels."""

from __future__ import annotations

from dataclasses import fields

import pytest

from castiron.emitter.kernels.matmul.gemv import Gemv
from castiron.emitter.kernels.matmul.selection import default_tiles, kernel_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import AVX2
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile import tile_store as store
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.evaluate.tune import REPEATS_TO_CONFIRM, Bench, MatmulSearch, answers, neighbours, search
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.cache_folder import cache_folder
from castiron.vmfb.compiler.iree_compile import CompileError
from tests.support.tiny_gguf import write_llama
from tests.support.toy_text import read_json

MATMULS = [
    Matmul("q8_0", 1, 960, 576, rms_eps=1e-5),
    Matmul("f16", 1, 96, 64),
    Matmul("q4_1", 1, 960, 576, rms_eps=1e-5, numerics="int24"),
    Matmul("q4_1", 8, 960, 576, numerics="int24"),
    Matmul("q4_1", 8, 960, 576),
    Matmul("q4_1", 128, 960, 576, length=True),
    Matmul("q4_1", 8, 960, 576, numerics="int8"),
    Matmul("q4_1", 128, 960, 576, length=True, numerics="int8"),
    Matmul("q4_1", 8, 96, 64, experts=4, per_row=2),
    Matmul("q4_1", 64, 96, 64, experts=4, per_row=2),
    Matmul("q4_1", 64, 96, 64, experts=4, per_row=2, numerics="int8"),
]


@pytest.mark.parametrize("tried", MATMULS, ids=lambda tried: tried.name)
def test_neighbours_change_one_field_and_the_code(tried):
    default, found = default_tiles(tried, AVX2, 2), list(neighbours(tried, AVX2, 2))
    texts = {kernel_of(tried, AVX2, 2).text}
    for tiles in found:
        assert sum(getattr(tiles, f.name) != getattr(default, f.name) for f in fields(tiles)) == 1
        texts.add(kernel_of(tried, AVX2, 2, tiles).text)
    assert len(texts) == 1 + len(found) >= 4
    # Only a GEMV of a float codec has a loop to unroll.
    if tried.tokens == 1:
        assert any(tiles.unroll != default.unroll for tiles in found) == (tried.codec == "f16")


class FakeBench:
    """A bench whose speed-ups come from a function of the tiles."""

    isa, threads = AVX2, 2

    def __init__(self, gain, confirmed=None, fails=lambda tiles: False):
        self.gain, self.confirmed, self.fails = gain, confirmed or gain, fails

    def gains(self, tiles, repeats):
        if any(map(self.fails, tiles.values())):
            raise CompileError("no")
        gain = self.confirmed if repeats == REPEATS_TO_CONFIRM else self.gain
        return {name: (1e-5, gain(found)) for name, found in tiles.items()}


def searched(bench) -> tuple[dict[str, MatmulSearch], int]:
    found = {matmul.name: MatmulSearch(matmul, "decode_step") for matmul in MATMULS[:2]}
    return found, search(bench, found, lambda stage, done: None)


def test_the_fastest_tiles_are_confirmed():
    gain = lambda tiles: 1.2 if tiles.together == 3 else 1.1 if tiles.ahead == 32 else 1.0
    found, refused = searched(FakeBench(gain))
    assert [(each.tiles.together, each.gain) for each in found.values()] == [(3, 1.2)] * 2 and refused == 0
    found, _ = searched(FakeBench(gain, confirmed=lambda tiles: 1.02))
    assert all(each.tiles is None and each.gain == 1.0 for each in found.values())
    found, _ = searched(FakeBench(lambda tiles: 1.02))
    assert all(each.tiles is None for each in found.values())


def test_counts_and_skips_rounds_that_do_not_compile():
    found, refused = searched(FakeBench(lambda tiles: 1.5, fails=lambda tiles: tiles.together == 3))
    assert refused >= 1 and all(each.tiles is not None and each.tiles.together != 3 for each in found.values())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Write a checkpoint, and use a new cache for findings; compiled modules stay shared."""
    compiled, own = cache_folder("compile"), tmp_path_factory.mktemp("cache")
    (own / "compile").symlink_to(compiled)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CASTIRON_CACHE", str(own))
        yield str(write_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(autouse=True)
def no_findings(checkpoint, monkeypatch):
    # Allow --threads 2 on a machine with one CPU.
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    store.store_path().unlink(missing_ok=True)


@pytest.fixture
def short_prefetches_are_faster(monkeypatch):
    """Report a speed-up of 2 for tiles that prefetch 5 records ahead, of matmuls with a fused norm only."""

    def gains(bench, tiles, repeats):
        faster = lambda name, found: "rms" in name and getattr(found, "ahead", 0) == 5
        return {name: (1e-5, 2.0 if faster(name, found) else 0.5) for name, found in tiles.items()}

    monkeypatch.setattr(Bench, "gains", gains)
    monkeypatch.setattr("castiron.pipelines.evaluate.tune._STEPS", {"ahead": lambda value: (5,)})


TUNE = ["--verify-widths", "4", "--batch", "2", "--threads", "2"]


def tune(checkpoint, capsys, *more: str) -> tuple[dict, str]:
    assert cli.main(["tune", checkpoint, *TUNE, "--json", *more]) == 0
    out, err = capsys.readouterr()
    return read_json(out), err


def test_gains_are_measured_for_the_given_functions(checkpoint, tmp_path):
    options = Options(verify_widths=(4,), batch=(), threads=2)
    bench = Bench(checkpoint, options, ["decode_step", "verify_4"], tmp_path, lambda stage, done: None)
    found = bench.matmuls()
    assert {each.function for each in found.values()} == {"decode_step", "verify_4"}
    tiles = {name: next(neighbours(each.matmul, bench.isa, 2)) for name, each in found.items()}
    gains = bench.gains(tiles, repeats=1)
    assert gains.keys() == found.keys()
    assert all(0 < seconds < 1 and 0 < gain < 100 for seconds, gain in gains.values())


def test_findings_are_stored_and_compiled_in(checkpoint, short_prefetches_are_faster, tmp_path, capsys):
    found, err = tune(checkpoint, capsys)
    assert err == "" and found["failed_rounds"] == 0 and found["changed_tokens"] == []
    tuned = {row["name"]: row["tiles"] for row in found["matmuls"] if row["tiles"]}
    assert tuned and all(tiles["ahead"] == 5 for tiles in tuned.values())
    assert all(row["function"] == "decode_step" and row["gain"] == 2.0 for row in found["matmuls"] if row["tiles"])
    assert cli.main(["compile", checkpoint, "-o", str(tmp_path / "out"), *TUNE]) == 0
    assert open_bundle(tmp_path / "out").manifest.compile["tuned"] == tuned
    capsys.readouterr()
    # Known matmuls are not searched again.
    again, _ = tune(checkpoint, capsys)
    assert all(row["cached"] for row in again["matmuls"])
    assert {row["name"]: row["tiles"] for row in again["matmuls"] if row["tiles"]} == tuned
    assert cli.main(["tune", checkpoint, *TUNE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("matmul") and lines[1].endswith("unroll 4") and "have better tiles on 2 threads" in lines[-2]
    assert lines[-1].endswith(str(store.store_path()))


def test_a_faster_kernel_that_is_wrong_is_dropped(checkpoint, short_prefetches_are_faster, monkeypatch, capsys):
    """With that distance, a sum is another row's here."""
    right = Gemv._dots

    def wrong(self, *args):
        sums = right(self, *args)
        return [*sums[1:], sums[0]] if self.tiles.ahead == 5 else sums

    monkeypatch.setattr(Gemv, "_dots", wrong)
    kernel_of.cache_clear()
    found, err = tune(checkpoint, capsys, "--functions", "verify_4,prefill_8")
    kernel_of.cache_clear()
    assert found["changed_tokens"] and not any(row["tiles"] for row in found["matmuls"])
    assert "because the model's tokens change with them" in err and err.count("\n") == 1
    assert all(finding.tiles is None for finding in store.read_findings())


def test_answers_cover_every_function(checkpoint, tmp_path):
    options = Options(verify_widths=(4,), batch=(2,), threads=2)
    bundle = Bench(checkpoint, options, [], tmp_path, lambda stage, done: None).bundle
    prompts = [[1, 2, 3], list(range(60))]
    found = answers(bundle, 2, prompts)
    assert [len(tokens) for tokens in found] == [32, 4, 32, 4] + [2] * 8
    assert found[1] == (found[0] * 2)[1:5] and found == answers(bundle, 1, prompts)
    assert [row[0] for row in found[4:]] == found[0][1:9]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--target", "x86-64-v3"], "it measures this CPU; remove them"),
        (["--lowering", "portable"], "it measures this CPU; remove them"),
        (["--functions", "decode_step,verify_9"], "unknown function: 'verify_9'; --functions takes decode_step, prefill_8"),
    ],
)
def test_rejects_what_cannot_be_tuned_before_compiling(checkpoint, monkeypatch, more, message, capsys):
    monkeypatch.setattr(Bench, "compiled", None)
    assert cli.main(["tune", checkpoint, *TUNE, *more]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err and err.count("\n") == 1
    assert not store.store_path().exists()


def test_a_context_without_space_for_an_answer_is_rejected(checkpoint, capsys):
    assert cli.main(["tune", checkpoint, *TUNE, "--context", "16"]) == 1
    assert "no test prompt fits in the context: 16 tokens" in capsys.readouterr().err


def test_an_interrupted_search_stores_nothing(checkpoint, monkeypatch, capsys):
    def interrupted(bench, tiles, repeats):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "gains", interrupted)
    assert cli.main(["tune", checkpoint, *TUNE]) == 130
    assert not store.store_path().exists() and capsys.readouterr().err == "castiron: interrupted\n"
