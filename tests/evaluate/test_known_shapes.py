"""Test random checkpoints of known shapes, and castiron bench --shape."""

from __future__ import annotations

import os
import shutil
from collections import Counter, namedtuple
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

from castiron.emitter.codecs import row_bytes
from castiron.emitter.models import read_config
from castiron.pipelines.checkpoints.gguf.gguf_file import GGML_TYPE
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate import bench_engines as bench
from castiron.pipelines.evaluate import random_checkpoint
from castiron.pipelines.evaluate.random_checkpoint import SHAPES, checkpoint_of, gguf_parts, tiled_rows
from castiron.vmfb.atomic_write import replace_file
from tests.evaluate.test_bench import ENGINE_KEYS, FixedMachine
from tests.support.toy_text import read_json

TINY = SHAPES["llama-3.2-1b"] | {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 256,
}  # fmt: skip
RECURRENT = SHAPES["qwen3.5-0.8b"] | {
    "vocab_size": 96, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 2,
    "head_dim": 128, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
# Published numbers of parameters; for Qwen 3.5 those of its text model in transformers.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400, "qwen3-8b": 8_190_735_360, "qwen3-30b-a3b": 30_532_122_624, "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-27b": 26_895_998_464,
}  # fmt: skip


def entries(folder: Path) -> list[Path]:
    """Return what is in a folder of the cache, without its list of written entries."""
    return sorted(path for path in folder.iterdir() if path.name != ".written-by-castiron")


@pytest.fixture(autouse=True)
def tiny(own_cache, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SHAPES, "recurrent", RECURRENT)
    monkeypatch.setattr("castiron.pipelines.evaluate.machine.Machine", FixedMachine)
    return own_cache / "shapes"


def make(codec: str = "q4_k"):
    return random_checkpoint.random_checkpoint("tiny", codec, lambda *_: None)


def parts_of(name: str, weights: str):
    return gguf_parts(checkpoint_of(name, SHAPES[name]), weights)


def test_shapes_have_the_published_number_of_parameters():
    shapes = {name: checkpoint_of(name, SHAPES[name]).tensors.values() for name in PARAMETERS}
    assert {name: sum(prod(tensor.shape) for tensor in tensors) for name, tensors in shapes.items()} == PARAMETERS


def test_a_gguf_file_may_have_any_codec():
    for codec in GGML_TYPE:
        header, tensors = parts_of("llama-3.2-1b", codec)
        assert len(header) % 32 == 0
        assert sum(tensor.nbytes for tensor in tensors) >= row_bytes(codec, 256) / 256 * PARAMETERS["llama-3.2-1b"]


def test_q4_k_is_mixed_as_in_llama_cpp():
    """q6_k is used in the first two, last two and every third of 16 layers, and in a tied head."""
    codecs = {tensor.name: tensor.codec for tensor in parts_of("llama-3.2-1b", "q4_k_m")[1]}
    assert Counter(codecs.values()) == {"q4_k": 7 * 16 - 16, "q6_k": 17, "f32": 2 * 16 + 2}
    assert codecs["blk.4.attn_v.weight"] == codecs["blk.4.ffn_down.weight"] == codecs["token_embd.weight"] == "q6_k"


@pytest.mark.parametrize("codec", sorted(set(GGML_TYPE) - {"q2_0"}))  # `gguf` does not have Q2_0 yet
def test_both_gguf_readers_accept_the_file(codec, tiny):
    path = make(codec)
    assert path.parent == tiny and [entry.name for entry in entries(tiny)] == [path.name]
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    _, tensors = parts_of("tiny", "q4_k_m" if codec == "q4_k" else codec)
    assert {n: (tuple(t.shape)[::-1], t.tensor_type.name.lower()) for n, t in read.items()} == {
        tensor.name: (tensor.shape, tensor.codec) for tensor in tensors
    }
    checkpoint = open_checkpoint(path)
    assert checkpoint.tokenizer is None and checkpoint.config["vocab_size"] == 512
    assert checkpoint.config["rope_scaling"]["rope_type"] == "llama3" and checkpoint.config["rope_scaling"]["factor"] == 32
    check_values(checkpoint)


def check_values(checkpoint) -> None:
    """Fail unless the values are like those of trained weights."""
    for tensor in checkpoint.tensors.values():
        values = tensor.dequantise()
        assert np.isfinite(values).all() and (0.005 < np.abs(values).mean() < 1.001 or "column_order" in tensor.name)


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


@pytest.mark.parametrize("codec", ["q4_k", "q1_0"])
def test_a_hybrid_model_is_read_as_its_shape(codec):
    path = random_checkpoint.random_checkpoint("recurrent", codec, lambda *_: None)
    checkpoint, wanted = open_checkpoint(path), checkpoint_of("recurrent", RECURRENT)
    assert read_config(checkpoint.config).layer_types == read_config(RECURRENT).layer_types
    shapes = [{name: tensor.shape for name, tensor in each.tensors.items()} for each in (checkpoint, wanted)]
    # A block of 256 columns spans two heads of 128.
    orders = {order: (4 * 128,) for order in checkpoint.column_orders.values()}
    assert len(orders) == (codec == "q4_k")
    shapes[1] |= orders
    assert shapes[0] == shapes[1]
    check_values(checkpoint)


def test_removes_files_of_killed_processes_only(tiny):
    tiny.mkdir(parents=True)
    (tiny / ".tiny.q4_k.gguf.castiron-0123abcd").mkdir()
    with replace_file(tiny / "other"):
        (alive,) = (path for path in tiny.iterdir() if path.name.startswith(".other"))
        make()
        assert entries(tiny) == [alive, tiny / "tiny.q4_k.gguf"]


def test_checks_disk_space_and_reports_what_is_written(tiny, monkeypatch, capsys):
    make()
    assert "castiron: writing a random checkpoint of " in capsys.readouterr().err
    make()
    assert capsys.readouterr().err == ""
    usage = namedtuple("usage", "total used free")(1 << 30, 0, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PipelineError, match=r"a random checkpoint of .* with its bundle needs .* has 0\.0 MB free"):
        make("q8_0")
    assert [path.name for path in entries(tiny)] == ["tiny.q4_k.gguf"]


def test_rows_of_a_repeated_tile_differ():
    assert len(np.unique(tiled_rows("q4_0", 64, 4096), axis=0)) == 64


def test_bench_measures_a_shape(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "FIRST_PROMPT", 8)
    options = ["--shape", "tiny", "--context", "64", "--prompt", "9", "--gen", "5", "--rounds", "1", "--threads", "1", "--json"]
    saved = str(tmp_path / "saved.json")
    assert cli.main(["bench", *options, "--numerics", "fast", "--output", saved]) == 0
    out, err = capsys.readouterr()
    result = read_json(out)
    assert set(result["castiron"]) > ENGINE_KEYS and result["castiron"]["prefill_peak_share"] > 0
    assert result["settings"]["model"] == "tiny.q4_k" and result["settings"]["numerics"] == "fast"
    assert "a random checkpoint" in err and "compiling" in err
    assert cli.main(["bench", *options, "--numerics", "fast"]) == 0
    assert capsys.readouterr().err == ""
    (bundle,) = entries(tmp_path / "cache" / "bundles")
    assert (bundle / "manifest.json").exists() and len(entries(tiny)) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give a bundle DIR, --shape NAME, or --kernel"),
        (["--shape", "llama-9"], "unknown shape of a model: llama-9; use one of llama-3.2-1b, qwen3-8b"),
        (["--shape", "tiny", "--codec", "q1_k"], "unknown codec: q1_k; --codec takes f32"),
        (["--shape", "tiny", "--tokens", "4"], "--tokens does not apply to a random model"),
        (["--shape", "tiny", "--checkpoint", "x"], "--checkpoint does not apply to a random model"),
        (["--shape", "tiny", "--context", "0"], "--context is 0"),
        (["--shape", "tiny", "--context", "100"], "--prompt, --gen and --depth need 512 positions"),
        ([".", "--shape", "tiny"], "--shape cannot be combined with a bundle: ."),
        ([".", "--codec", "q4_k"], "--codec does not apply to a compiled bundle"),
        (["--kernel", "gemm"], "--kernel gemm needs --shape"),
    ],
)
def test_rejects_options_that_do_not_apply(options, message, capsys):
    assert cli.main(["bench", *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err.splitlines()[-1] and "Traceback" not in err
