"""Bench: what it measures and works out, and the object it prints."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from castiron.pipelines import cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring import bench
from castiron.pipelines.measuring.bench import Measured, Settings, ratios, summarise
from castiron.pipelines.measuring.machine import CHAINS, FMA_ITERATIONS, READ_FLOATS, Machine
from castiron.pipelines.measuring.workload import Workload, bundle_bytes, bytes_read, parameter_sizes
from tests.pipelines import toy_text
from tests.pipelines.toy_text import read_json

ENGINE_KEYS = {"decode_tok_s", "prefill_tok_s", "decode_roofline", "prefill_peak_share", "ttft_ms", "rss_mb", "runs"}
SMOLLM2 = {"hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
           "intermediate_size": 1536, "vocab_size": 49152}  # fmt: skip


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "toy"))


class FixedMachine:
    """A machine of 10 GB/s and 100 GFLOP/s."""

    def __init__(self, threads):
        pass

    def read_gb_s(self):
        return 10.0

    def peak_gflop_s(self):
        return 100.0


@pytest.fixture
def fixed_machine(monkeypatch):
    monkeypatch.setattr("castiron.pipelines.measuring.machine.Machine", FixedMachine)
    # The toy's context is shorter than the prompt that first tokens are timed with.
    monkeypatch.setattr(bench, "FIRST_PROMPT", 8)


def run(capsys, *argv) -> dict:
    assert cli.main(["bench", *argv, "--json"]) == 0
    return read_json(capsys.readouterr().out)


def test_the_object_has_what_the_readers_of_it_expect(bundle, fixed_machine, tmp_path, capsys):
    output = tmp_path / "bench.json"
    options = ["--threads", "1", "--prompt", "9", "--gen", "5", "--depth", "2", "--rounds", "2", "--output", str(output)]
    result = run(capsys, bundle, *options)
    assert json.loads(output.read_text()) == result
    assert set(result) == {"castiron", "peers", "machine", "ratios", "settings", "missing"}
    ours = result["castiron"]
    assert set(ours) == ENGINE_KEYS and all(ours[key] > 0 for key in ENGINE_KEYS - {"runs"})
    for key in ("decode_tok_s", "prefill_tok_s", "ttft_ms"):
        runs = ours["runs"][key]
        assert set(runs) == {"median", "min", "max", "values"}
        assert len(runs["values"]) == 2 and runs["min"] <= runs["median"] <= runs["max"]
    assert result["machine"]["read_gb_s"] == 10 and result["machine"]["peak_gflop_s"] == 100
    assert result["peers"] == {} and result["ratios"] == {}


def test_engines_take_turns_and_the_first_turn_is_not_counted(monkeypatch):
    log = []

    class Recorded:
        def __init__(self, engine, model, threads, context):
            self.engine = engine
            assert (threads, context) == (3, 40)

        def ask(self, op, **arguments):
            log.append((self.engine, op))
            turn = log.count((self.engine, op))
            if op in ("prefill", "decode"):
                assert len(arguments["tokens"]) == {"prefill": 40, "decode": 8}[op]
            return {"seconds": 0.5 * turn, "rss_mb": 7.0}

        def close(self):
            log.append((self.engine, "close"))

    monkeypatch.setattr(bench, "Worker", Recorded)
    monkeypatch.setattr(bench, "time_to_first_token", lambda command: 0.25)
    monkeypatch.setattr(bench, "PAUSE_SECONDS", 0)
    models, measured = {"castiron": "a", "hf": "b"}, {name: Measured(name, 1, 4) for name in ("castiron", "hf")}
    settings = Settings(3, prompt=40, gen=8, depth=4, rounds=3)
    limits = bench.measure(models, measured, settings, list(range(40)), FixedMachine(3), lambda *_: None)
    turns = [engine for engine, op in log if op == "decode"]
    assert turns == ["castiron", "hf"] * 4
    assert ("castiron", "fill") in log and log[-2:] == [("castiron", "close"), ("hf", "close")]
    assert measured["hf"].decode == [8 / 1.0, 8 / 1.5, 8 / 2.0]
    assert measured["hf"].prefill == [40 / 1.0, 40 / 1.5, 40 / 2.0]
    assert measured["castiron"].first == [250.0] * 3 and measured["hf"].rss_mb == 7
    assert limits == {"read_gb_s": [10.0] * 3, "peak_gflop_s": [100.0] * 3}


def test_shares_are_of_the_machines_limits():
    workload = Workload.of(SMOLLM2)
    # The numbers that the model's makers and llama.cpp give: 106 million in the layers, 28 in the head.
    assert workload.matrices == 30 * (2 * 576 * 576 + 2 * 576 * 192 + 3 * 576 * 1536) and workload.head == 49152 * 576
    settings = Settings(2, prompt=512, gen=64, depth=1000)
    cache = 2 * 30 * 3 * 64 * 4 * (1000 + np.arange(1, 65)).mean()
    assert workload.cache_bytes(1000, 64, 4) == pytest.approx(cache)
    flops = 2 * workload.matrices * 512 + 2 * workload.head + 4 * 30 * 9 * 64 * sum(range(1, 513))
    assert workload.prefill_flops(512) == flops
    measured = Measured("castiron", 98e6, 4, decode=[50, 100, 200], prefill=[400, 500, 900], first=[9, 10, 11], rss_mb=1)
    found = summarise(measured, settings, workload, {"read_gb_s": 20.0, "peak_gflop_s": 200.0})
    assert found["decode_tok_s"] == 100 and found["prefill_tok_s"] == 500 and found["ttft_ms"] == 10
    assert found["decode_roofline"] == pytest.approx((98e6 + cache) * 100 / 20e9, abs=1e-4)
    assert found["prefill_peak_share"] == pytest.approx(flops / 512 * 500 / 200e9, abs=1e-4)


def test_ratios_above_one_are_in_castirons_favour():
    ours = {"decode_tok_s": 200, "prefill_tok_s": 900, "ttft_ms": 100, "rss_mb": 150}
    peer = {"decode_tok_s": 100, "prefill_tok_s": 300, "ttft_ms": 250, "rss_mb": 300}
    assert ratios(ours, peer) == {"decode": 2.0, "prefill": 3.0, "ttft": 2.5, "rss": 2.0}


def test_a_table_beside_the_head_is_not_read_for_a_token(bundle):
    from castiron.vmfb.bundle import open_bundle

    opened = open_bundle(bundle)
    assert bundle_bytes(opened) == sum(parameter_sizes(opened.path / "weights.irpa").values()) > 0


MIXTRAL = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
           "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
QWEN3_30B_A3B = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
                 "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "vocab_size": 151936,
                 "num_experts": 128, "num_experts_per_tok": 8}  # fmt: skip


@pytest.mark.parametrize(("config", "active"), [(MIXTRAL, 12.88e9), (QWEN3_30B_A3B, 3.35e9)])
def test_a_token_passes_its_own_experts_only(config, active):
    """The makers give active parameters with embedding and head."""
    workload = Workload.of(config)
    assert workload.matrices + 2 * workload.head == pytest.approx(active, rel=0.005)


def test_layers_without_experts_and_weights_of_experts_are_told_apart():
    two = {**QWEN3_30B_A3B, "num_hidden_layers": 2}
    mlp, experts = 3 * 2048 * 6144, 3 * 2048 * 768 * 8 + 2048 * 128
    attention = Workload.of(two).matrices - 2 * experts
    assert Workload.of({**two, "mlp_only_layers": [1]}).matrices == attention + mlp + experts
    assert Workload.of({**two, "decoder_sparse_step": 2}).matrices == attention + mlp + experts
    sizes = {"model.embed_tokens.weight": 5, "l.0.mlp.experts.down_proj.weight": 128, "l.0.mlp.gate.weight": 3}
    assert bytes_read(sizes, two, tied=False) == 8 + 3 and bytes_read(sizes, two, tied=True) == 5 + 8 + 3


def test_a_peer_that_is_not_installed_is_named_with_the_command_that_installs_it(
    bundle, fixed_machine, monkeypatch, tmp_path, capsys
):
    checkpoint = tmp_path / "toy.gguf"
    checkpoint.write_bytes(b"")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llama_cpp" else find(name, *a))
    options = ["--threads", "1", "--prompt", "4", "--gen", "2", "--rounds", "1", "--against", "llama.cpp"]
    assert cli.main(["bench", bundle, *options, "--model", str(checkpoint), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "pip install llama-cpp-python" in read_json(out)["missing"]["llama.cpp"] and "llama.cpp" in err
    assert "llama.cpp" not in read_json(out)["peers"]


def test_an_engine_that_fails_says_why_in_one_sentence(tmp_path):
    with pytest.raises(PipelineError, match="castiron ended: .*is not a directory") as error:
        bench.Worker("castiron", str(tmp_path / "nothing"), 1, 8)
    assert "\n" not in str(error.value)
    command = bench.first_token_command("castiron", str(tmp_path / "nothing"), Settings(1), [1, 2])
    with pytest.raises(PipelineError, match="is not a directory"):
        bench.time_to_first_token(command)


def test_hf_is_timed_at_the_depth_asked_for_and_gives_its_own_tokens(tmp_path):
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


def test_the_probes_do_the_work_that_they_are_counted_for():
    machine = Machine(1)
    assert 0.5 < machine.read_gb_s(1) < 2000 and 1 < machine.peak_gflop_s(1) < 20000
    for name in ("read", "fma"):
        function, arguments, operand = machine._calls[name]
        machine._context.invoke(function, arguments, machine._results)
        import iree.runtime as rt

        view = machine._results.get_as_object(0, rt.HalBufferView)
        found = np.array(view.map().asarray(list(view.shape), np.dtype(np.float32)))
        if name == "read":
            # Every float is 1, and every one is in one sum.
            assert found.sum() == READ_FLOATS
        else:
            values = operand.array[:-2].astype(np.float64)
            a, b = operand.array[-2:].astype(np.float64)
            expected = (values * a**FMA_ITERATIONS + b * (1 - a**FMA_ITERATIONS) / (1 - a)).sum(0)
            assert np.allclose(found, expected, rtol=1e-3)


@pytest.mark.parametrize("isa", CHAINS)
def test_the_probes_compile_for_every_kind_of_cpu(isa, tmp_path):
    from castiron.pipelines.measuring.machine import probe_text
    from castiron.vmfb.compiler import compile_mlir
    from castiron.vmfb.targets import TARGETS

    target = next(target for target in TARGETS.values() if target.isa == isa and target.name != "host")
    compile_mlir(probe_text(*CHAINS[isa]), target, tmp_path / "probe.vmfb")


def test_a_chart_shows_every_engine(tmp_path):
    from castiron.pipelines.measuring.chart import draw

    def engine(decode, prefill):
        runs = {"decode_tok_s": bench.spread([decode]), "prefill_tok_s": bench.spread([prefill * 0.9, prefill])}
        return {"decode_tok_s": decode, "prefill_tok_s": prefill, "runs": runs}

    result = {
        "castiron": engine(180, 800), "peers": {"llama.cpp": engine(120, 310), "hf": engine(14, 490)},
        "machine": {"cpu": "a CPU"}, "settings": {"model": "m", "threads": 2, "gen": 64, "depth": 0, "prompt": 512},
    }  # fmt: skip
    draw(result, tmp_path / "a.svg")
    draw(result, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw(result, tmp_path / "c.png")
    assert (tmp_path / "c.png").stat().st_size > 1000
