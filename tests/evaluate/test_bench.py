"""Test castiron bench: its measurements, shares and ratios, and the object that it prints."""

from __future__ import annotations

import importlib.util
import json
import os

import numpy as np
import pytest

from castiron.emitter.graph.printer import print_module
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.mlir.matrix import DEPTH
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.named_kernel import kernel_module
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate import bench_engines as bench
from castiron.pipelines.evaluate.bench import Workload, ratios, summarise
from castiron.pipelines.evaluate.bench_engines import Engine, Settings
from castiron.pipelines.evaluate.machine import (
    DOT_ITERATIONS,
    DOTS,
    FMA_ITERATIONS,
    HIGH,
    MATRIX_ITERATIONS,
    READ_FLOATS,
    WIDE,
    Machine,
    chains_of,
    probes_of,
)
from castiron.vmfb.compiler.iree_compile import compile_modules
from castiron.vmfb.targets import TARGETS
from tests.support import toy_text
from tests.support.tiny_gguf import write_llama
from tests.support.toy_text import read_json

ENGINE_KEYS = {"decode_tok_s", "prefill_tok_s", "ttft_ms", "rss_mb", "runs"}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "toy"))


class FixedMachine:
    """A machine of 10 GB/s, 100 GFLOP/s and 400 GOP/s of int8."""

    def __init__(self, threads):
        pass

    def measure(self, limit):
        return {"read_gb_s": 10.0, "peak_gflop_s": 100.0, "peak_bytes_gop_s": 400.0}[limit]


@pytest.fixture
def fixed_machine(monkeypatch):
    for module in ("machine", "bench"):
        monkeypatch.setattr(f"castiron.pipelines.evaluate.{module}.Machine", FixedMachine)
    # The toy's context is shorter than the prompt that first tokens are timed with.
    monkeypatch.setattr(bench, "FIRST_PROMPT", 8)


def run(capsys, *argv) -> dict:
    assert cli.main(["bench", *argv, "--json"]) == 0
    return read_json(capsys.readouterr().out)


def test_the_json_object_has_its_documented_fields(bundle, fixed_machine, tmp_path, capsys):
    output = tmp_path / "bench.json"
    options = ["--threads", "1", "--prompt", "9", "--gen", "5", "--depth", "2", "--rounds", "2", "--output", str(output)]
    result = run(capsys, bundle, *options)
    assert json.loads(output.read_text()) == result
    assert set(result) == {"castiron", "peers", "machine", "ratios", "settings", "missing", "busy"}
    ours = result["castiron"]
    # The manifest of the toy bundle does not describe the work of its functions.
    shares = {"decode_roofline", "prefill_peak_share"}
    assert set(ours) == ENGINE_KEYS | shares and all(ours[key] is None for key in shares)
    assert all(ours[key] > 0 for key in ENGINE_KEYS - {"runs"})
    for key in ("decode_tok_s", "prefill_tok_s", "ttft_ms"):
        runs = ours["runs"][key]
        assert set(runs) == {"median", "min", "max", "values"}
        assert len(runs["values"]) == 2 and runs["min"] <= runs["median"] <= runs["max"]
    assert result["machine"]["read_gb_s"] == 10 and result["machine"]["peak_gflop_s"] == 100
    assert result["peers"] == {} and result["ratios"] == {}


def test_a_packed_bundle_is_measured_without_unpacking(bundle, fixed_machine, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    assert cli.main(["pack", bundle, "-o", str(tmp_path / "one.castiron")]) == 0
    capsys.readouterr()
    options = ["--threads", "1", "--prompt", "4", "--gen", "2", "--rounds", "1"]
    assert run(capsys, str(tmp_path / "one.castiron"), *options)["castiron"]["decode_tok_s"] > 0


def test_engines_take_turns_and_the_first_turn_is_not_counted(monkeypatch):
    log = []

    class Recorded:
        def __init__(self, engine, model, settings):
            self.engine = engine
            assert (settings.threads, settings.context) == (3, 40)

        def ask(self, op, *arguments):
            log.append((self.engine, op))
            if op in ("prefill", "decode"):
                assert len(arguments[-1]) == {"prefill": 40, "decode": 8}[op]
            return 7.0 if op == "memory" else 0.5 * log.count((self.engine, op))

        def close(self):
            log.append((self.engine, "close"))

    monkeypatch.setattr(bench, "Worker", Recorded)
    monkeypatch.setattr(bench, "time_to_first_token", lambda *_: 0.25)
    monkeypatch.setattr(bench, "PAUSE_SECONDS", 0)
    measured = {name: Engine(name, name) for name in ("castiron", "hf")}
    settings = Settings(3, prompt=40, gen=8, depth=4, rounds=3)
    limits, missing = bench.measure(measured, settings, list(range(40)), FixedMachine(3), lambda *_: None)
    assert missing == {}
    turns = [engine for engine, op in log if op == "decode"]
    assert turns == ["castiron", "hf"] * 4
    assert ("castiron", "fill") in log and log[-2:] == [("castiron", "close"), ("hf", "close")]
    assert measured["hf"].decode == [8 / 1.0, 8 / 1.5, 8 / 2.0]
    assert measured["hf"].prefill == [40 / 1.0, 40 / 1.5, 40 / 2.0]
    assert measured["castiron"].first == [250.0] * 3 and measured["hf"].rss_mb == 7
    assert limits == {"read_gb_s": [10.0] * 3, "peak_gflop_s": [100.0] * 3}


class FixedWork(Workload):
    """A workload of 98 MB of weights, 1 MB of cache per position, and 1 GFLOP per prompt token."""

    def _kernels(self, function="decode_step"):
        return [{"weights": 0}]

    def decode_bytes(self, depth, tokens):
        return 98e6 + 1e6 * (depth + (tokens + 1) / 2)

    def prefill_flops(self, tokens):
        return 1e9 * tokens


def test_roofline_and_peak_share_follow_from_the_machines_limits():
    settings = Settings(2, prompt=512, gen=64, depth=1000)
    measured = summarise(Engine("castiron", "a", decode=[50, 100, 200], prefill=[400, 500, 900], first=[9, 10, 11], rss_mb=1))
    assert measured["decode_tok_s"] == 100 and measured["prefill_tok_s"] == 500 and measured["ttft_ms"] == 10
    found = FixedWork(None).shares(settings, measured, {"read_gb_s": 20.0, "peak_gflop_s": 2000.0})
    assert found["decode_roofline"] == pytest.approx((98e6 + 1032.5e6) * 100 / 20e9, abs=1e-4)
    assert found["prefill_peak_share"] == 500e9 / 2000e9


def test_ratios_above_one_are_in_castirons_favour():
    ours = {"decode_tok_s": 200, "prefill_tok_s": 900, "ttft_ms": 100, "rss_mb": 150}
    peer = {"decode_tok_s": 100, "prefill_tok_s": 300, "ttft_ms": 250, "rss_mb": 300}
    assert ratios(ours, peer) == {"decode": 2.0, "prefill": 3.0, "ttft": 2.5, "rss": 2.0}


def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it(
    bundle, fixed_machine, monkeypatch, tmp_path, capsys
):
    checkpoint = tmp_path / "toy.gguf"
    checkpoint.write_bytes(b"")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llama_cpp" else find(name, *a))
    options = ["--threads", "1", "--prompt", "4", "--gen", "2", "--rounds", "1", "--against", "llama.cpp"]
    assert cli.main(["bench", bundle, *options, "--checkpoint", str(checkpoint), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "pip install llama-cpp-python" in read_json(out)["missing"]["llama.cpp"] and "llama.cpp" in err
    assert "llama.cpp" not in read_json(out)["peers"]


def test_a_failed_engine_has_one_error_line(tmp_path):
    with pytest.raises(PipelineError, match="castiron ended: .*no such file or directory") as error:
        bench.Worker("castiron", str(tmp_path / "nothing"), Settings(1))
    assert "\n" not in str(error.value)
    with pytest.raises(PipelineError, match="no such file or directory"):
        bench.time_to_first_token("castiron", str(tmp_path / "nothing"), Settings(1), [1, 2])


# The parts of llama-cpp-python that castiron uses. The process kills itself in the given stage.
FAKE_LLAMA_CPP = """
import os, signal, types
llama_cpp = types.SimpleNamespace(llama_model_default_params=None)
class Llama:
    def __init__(self, path, **options):
        self.n_tokens = 0
        self.reached("load")
    def reached(self, stage):
        if stage == os.environ["STAGE"]:
            os.kill(os.getpid(), getattr(signal, os.environ["SIGNAL"]))
    def reset(self):
        if os.environ["STAGE"] == "reset":
            raise ValueError("no such model")
    def eval(self, tokens):
        self.reached("decode" if len(tokens) == 1 else "prefill")
    def sample(self, temp):
        self.reached("first")
        return 1
"""


@pytest.fixture
def fake_llama_cpp(tmp_path, monkeypatch):
    """Put the fake on the import path, also of workers.

    Return a function that sets where it crashes and returns the options of bench.
    """
    (tmp_path / "llama_cpp.py").write_text(FAKE_LLAMA_CPP)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def crash(stage: str, name: str = "SIGSEGV") -> list[str]:
        for key, value in (("STAGE", stage), ("SIGNAL", name)):
            monkeypatch.setenv(key, value)
        options = ["--threads", "1", "--prompt", "4", "--gen", "2", "--rounds", "1", "--against", "llama.cpp"]
        return [*options, "--checkpoint", str(write_llama(tmp_path / "tiny.gguf"))]

    return crash


@pytest.mark.parametrize(("stage", "name"), [("load", "SIGILL"), ("decode", "SIGSEGV"), ("first", "SIGABRT")])
def test_a_peer_that_crashes_is_missing_and_castiron_is_measured(bundle, fixed_machine, fake_llama_cpp, stage, name, capsys):
    assert cli.main(["bench", bundle, *fake_llama_cpp(stage, name)]) == 0
    out, err = capsys.readouterr()
    assert "\ncastiron " in out and "llama.cpp" not in out and "against" not in out
    assert f"llama.cpp: crashed ({name})\n" in err


def test_a_peer_that_rejects_the_model_is_missing_with_its_reason(bundle, fixed_machine, fake_llama_cpp, capsys):
    assert cli.main(["bench", bundle, *fake_llama_cpp("reset"), "--json"]) == 0
    result = read_json(capsys.readouterr().out)
    assert result["missing"] == {"llama.cpp": "ended: ValueError: no such model"} and result["castiron"]["prefill_tok_s"] > 0


def test_hf_decodes_from_the_given_depth(tmp_path):
    from castiron.reference import hf, tiny
    from castiron.reference.peers import HuggingFace

    path = tiny.tiny_model("llama", tmp_path / "llama")
    peer = HuggingFace(path, 1, 64)
    tokens = list(range(5, 25))
    assert peer.first(tokens) == hf.greedy(hf.load(path, 1), tokens, 1).tokens[0]
    for depth, n in ((20, 3), (7, 2), (0, 4)):
        peer.fill(tokens)
        assert peer.decode(depth, tokens[:n]) > 0
        assert peer.cache.get_seq_length() == depth + n


def test_the_probes_do_the_arithmetic_that_is_counted():
    machine = Machine(1)
    # Bounds that also hold on a busy machine.
    for limit, highest in (("read_gb_s", 2000), ("peak_gflop_s", 20000), ("peak_bytes_gop_s", 80000)):
        assert 0 < machine.measure(limit, 0.01) < highest
    assert machine.measure("no such limit") == 0
    chains = chains_of(machine.isa)
    found = {limit: probe.results["y"] for limit, probe in machine.probes.items() if probe.seconds(0)}
    # Every float is 1 and is added once.
    assert found["read_gb_s"].sum() == READ_FLOATS
    # A sum starts at its word and adds the squares of the bytes 4, 3, 2 and 1.
    one = (0x01020304 + DOT_ITERATIONS * DOTS * (16 + 9 + 4 + 1)) * chains
    assert np.allclose(found["peak_bytes_gop_s"], (one + 2**31) % 2**32 - 2**31, rtol=1e-6)
    values = machine.probes["peak_gflop_s"].copies[0]["x"].astype(np.float64)
    a, b = values[-2:]
    sums = (values[:-2] * a**FMA_ITERATIONS + b * (1 - a**FMA_ITERATIONS) / (1 - a)).sum(0)
    assert np.allclose(found["peak_gflop_s"], sums, rtol=1e-3)
    if "peak_pairs_gflop_s" in found:
        assert np.allclose(found["peak_pairs_gflop_s"], chains * (2 * FMA_ITERATIONS + (chains - 1) / 2))
    if "peak_matrix_gflop_s" in found:
        assert np.allclose(found["peak_matrix_gflop_s"], HIGH * WIDE * DEPTH * MATRIX_ITERATIONS)


@pytest.mark.parametrize("isa", ISAS)
def test_the_probes_compile_for_every_kind_of_cpu(isa, tmp_path):
    target = next(target for target in TARGETS.values() if target.isa == isa and target.name != "host")
    probes = {f"{name}.vmfb": print_module(kernel_module(probe, storage=True)) for name, probe in probes_of(ISAS[isa]).items()}
    compile_modules(probes, target, tmp_path)
