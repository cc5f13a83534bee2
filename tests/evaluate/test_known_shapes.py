"""Test random checkpoints of known shapes, and castiron bench --shape."""

from __future__ import annotations

import os
import shutil
from collections import Counter, namedtuple
from math import prod

import gguf
import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, row_bytes
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.weights import use_more_bits
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate import bench_engines as bench
from castiron.pipelines.evaluate import random_checkpoint
from castiron.pipelines.evaluate.random_checkpoint import SHAPES, Configured, Shape, tiled_rows
from castiron.vmfb.staging import replace_file
from tests.evaluate.test_bench import ENGINE_KEYS, FixedMachine
from tests.support.toy_text import read_json

TINY = Shape(
    "llama", "nowhere", vocab=512, hidden=256, inner=512, layers=8, heads=4, kv_heads=2, head_dim=64, tied=True,
    positions=256, rope_theta=500000.0, rms_eps=1e-5, rope_factor=8.0,
)  # fmt: skip
RECURRENT = Configured(
    "nowhere",
    {
        "model_type": "lfm2", "vocab_size": 96, "hidden_size": 64, "block_ff_dim": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "full_attn_idxs": [1], "max_position_embeddings": 128,
    },
)  # fmt: skip
# Published numbers of parameters; for Qwen 3.5 those of its text model in transformers.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096,
    "lfm2-1.2b": 1_170_340_608, "qwen3.5-0.8b": 752_393_024,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(own_cache, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SHAPES, "recurrent", RECURRENT)
    monkeypatch.setattr("castiron.pipelines.evaluate.machine.Machine", FixedMachine)
    return own_cache / "shapes"


def make(codec: str = "q4_k"):
    path, weights = random_checkpoint.random_checkpoint("tiny", codec, lambda *_: None)
    assert weights == "native"
    return path


def parameters(shape: Shape | Configured) -> int:
    if isinstance(shape, Configured):
        return sum(map(prod, shape.tensors().values()))
    return sum(prod(dims) for name, dims, _ in shape.tensors("f32") if not name.startswith("rope"))


def test_shapes_have_the_published_number_of_parameters():
    assert {name: parameters(shape) for name, shape in SHAPES.items() if name not in ("tiny", "recurrent")} == PARAMETERS


@pytest.mark.parametrize("name", [name for name in PARAMETERS if isinstance(SHAPES[name], Shape)])
def test_every_shape_has_every_codec(name):
    for codec in CODECS:
        head, sizes = random_checkpoint._head(SHAPES[name], codec)
        min_size = row_bytes(codec, 256) / 256 * parameters(SHAPES[name])
        assert len(head) % 32 == 0 and sum(sizes) >= min_size


def test_q4_k_is_mixed_as_in_llama_cpp():
    """q6_k is used in the first two, the last two and every third of 16 layers, and in a tied head."""
    assert [layer for layer in range(16) if use_more_bits(layer, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    codecs = {name: codec for name, _, codec in SHAPES["llama-3.2-1b"].tensors("q4_k")}
    assert Counter(codecs.values()) == {"q4_k": 7 * 16 - 16, "q6_k": 17, "f32": 2 * 16 + 2}
    assert codecs["blk.4.attn_v.weight"] == codecs["blk.4.ffn_down.weight"] == codecs["token_embd.weight"] == "q6_k"
    untied = {name: codec for name, _, codec in SHAPES["llama-3.1-8b"].tensors("q4_k")}
    assert (untied["token_embd.weight"], untied["output.weight"]) == ("q4_k", "q6_k")
    assert {codec for _, _, codec in SHAPES["qwen3-4b"].tensors("q8_0")} == {"q8_0", "f32"}


@pytest.mark.parametrize("codec", CODECS)
def test_both_gguf_readers_accept_the_file(codec, tiny):
    path = make(codec)
    assert path.parent == tiny and [entry.name for entry in tiny.iterdir()] == [path.name]
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {n: (tuple(t.shape)[::-1], t.tensor_type.name.lower()) for n, t in read.items()} == {
        name: (shape, own) for name, shape, own in TINY.tensors(codec)
    }
    checkpoint = open_checkpoint(path)
    assert checkpoint.tokenizer is None and checkpoint.config["vocab_size"] == 512
    assert checkpoint.config["rope_scaling"]["rope_type"] == "llama3" and checkpoint.config["rope_scaling"]["factor"] == 8
    for tensor in checkpoint.tensors.values():
        values = tensor.dequantise()
        # The values are like those of trained weights.
        assert np.isfinite(values).all() and 0.005 < np.abs(values).mean() <= 1


def test_makes_a_file_again_only_when_it_differs(tiny):
    path = make()
    os.utime(path, (1, 1))
    assert make() == path and path.stat().st_mtime == 1
    data = path.read_bytes()
    for other in (data[:-32], b"GGUF" + bytes(len(data) - 4)):
        path.write_bytes(other)
        make()
        assert path.read_bytes() == data
    assert make("q8_0") != path


def test_a_family_without_a_gguf_architecture_is_an_hf_directory(tiny):
    path, weights = random_checkpoint.random_checkpoint("recurrent", "q4_k", lambda *_: None)
    assert path == tiny / "recurrent" and weights == "q4_k_m"
    checkpoint = open_checkpoint(path)
    assert checkpoint.config == RECURRENT.config
    assert {name: tensor.shape for name, tensor in checkpoint.tensors.items()} == RECURRENT.tensors()
    for tensor in checkpoint.tensors.values():
        values = tensor.dequantise()
        assert np.isfinite(values).all() and 0.005 < np.abs(values).mean() <= 1
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert random_checkpoint.random_checkpoint("recurrent", "q8_0", lambda *_: None) == (path, "q8_0")
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(PipelineError, match="recurrent cannot be quantised to iq4_xs; --codec takes"):
        random_checkpoint.random_checkpoint("recurrent", "iq4_xs", lambda *_: None)


def test_removes_files_of_killed_processes_only(tiny):
    tiny.mkdir(parents=True)
    (tiny / ".tiny.q4_k.gguf.castiron-0123abcd").mkdir()
    with replace_file(tiny / "other"):
        (alive,) = (path for path in tiny.iterdir() if path.name.startswith(".other"))
        make()
        assert sorted(tiny.iterdir()) == [alive, tiny / "tiny.q4_k.gguf"]


def test_checks_and_reports_disk_space_first(tiny, monkeypatch, capsys):
    make()
    assert "castiron: tiny in q4_k: a random checkpoint of " in capsys.readouterr().err
    make()
    assert capsys.readouterr().err == ""
    usage = namedtuple("usage", "total used free")(1 << 30, 0, (1 << 28) + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PipelineError, match=r"268\.4 MB are free: use castiron cache clear"):
        make("q8_0")
    assert [path.name for path in tiny.iterdir()] == ["tiny.q4_k.gguf"]


def test_rows_of_a_repeated_tile_differ():
    assert len(np.unique(tiled_rows("q4_0", 64, 4096), axis=0)) == 64


def test_bench_measures_a_shape(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "FIRST_PROMPT", 8)
    options = ["--shape", "tiny", "--context", "64", "--prompt", "9", "--gen", "5", "--rounds", "1", "--threads", "1", "--json"]
    saved = str(tmp_path / "saved.json")
    assert cli.main(["bench", *options, "--numerics", "fast", "--output", saved]) == 0
    out, err = capsys.readouterr()
    result = read_json(out)
    assert set(result["castiron"]) == ENGINE_KEYS and result["castiron"]["prefill_peak_share"] > 0
    assert result["settings"]["model"] == "tiny.q4_k" and result["settings"]["numerics"] == "fast"
    assert "a random checkpoint" in err and "compiling" in err
    assert cli.main(["bench", *options, "--numerics", "fast"]) == 0
    assert capsys.readouterr().err == ""
    (bundle,) = (tmp_path / "cache" / "bundles").iterdir()
    assert (bundle / "manifest.json").exists() and len(list(tiny.iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give a bundle DIR, --shape NAME, or --kernel"),
        (["--shape", "llama-9"], "unknown shape: llama-9; without --kernel, --shape takes llama-3.2-1b, llama-3.1-8b"),
        (["--shape", "tiny", "--codec", "q1_k"], "unknown codec: q1_k; --codec takes f32"),
        (["--shape", "tiny", "--tokens", "4"], "--tokens does not apply to anything but a kernel"),
        (["--shape", "tiny", "--checkpoint", "x"], "--checkpoint does not apply to a random model"),
        (["--shape", "tiny", "--context", "0"], "--context is 0"),
        (["--shape", "tiny", "--context", "100"], "settings need 512 positions"),
        ([".", "--shape", "tiny"], "--shape and . exclude each other"),
        ([".", "--codec", "q4_k"], "--codec does not apply to a compiled bundle"),
        (["--kernel", "gemm"], "--kernel gemm needs --shape"),
    ],
)
def test_rejects_options_that_do_not_apply(options, message, capsys):
    assert cli.main(["bench", *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1] and "Traceback" not in err
