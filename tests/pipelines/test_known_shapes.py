"""Random checkpoints of known shapes: what is published, what is written, and what bench makes of it."""

from __future__ import annotations

import os
import shutil
from collections import Counter, namedtuple

import gguf
import numpy as np
import pytest

from castiron.emitter.codecs import CODECS, row_bytes
from castiron.pipelines import cli
from castiron.pipelines.checkpoints import open_checkpoint
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.measuring import bench, random_checkpoint
from castiron.pipelines.measuring.known_shapes import SHAPES, Configured, Shape, use_more_bits
from castiron.pipelines.measuring.random_rows import random_tile, tiled_rows
from castiron.vmfb.aside import replacing
from tests.pipelines.test_bench import ENGINE_KEYS, FixedMachine
from tests.pipelines.toy_text import read_json

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
# By their publishers; of Qwen 3.5 what transformers counts of its text.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "qwen3-0.6b": 596_049_920, "qwen3-4b": 4_022_468_096,
    "lfm2-1.2b": 1_170_340_608, "qwen3.5-0.8b": 752_393_024,
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(own_cache, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setitem(SHAPES, "recurrent", RECURRENT)
    monkeypatch.setattr("castiron.pipelines.measuring.machine.Machine", FixedMachine)
    return own_cache / "shapes"


def make(codec: str = "q4_k", progress=lambda *_: None):
    path, weights = random_checkpoint.random_checkpoint("tiny", codec, progress)
    assert weights == "native"
    return path


def test_shapes_have_as_many_weights_as_their_publishers_say():
    assert {name: shape.parameters for name, shape in SHAPES.items() if name not in ("tiny", "recurrent")} == PARAMETERS


@pytest.mark.parametrize("name", [name for name in PARAMETERS if isinstance(SHAPES[name], Shape)])
def test_every_shape_can_be_had_in_every_codec(name):
    for codec in CODECS:
        head, sizes = random_checkpoint._head(SHAPES[name], codec)
        least = row_bytes(codec, 256) / 256 * SHAPES[name].parameters
        assert len(head) % 32 == 0 and sum(sizes) >= least


def test_q4_k_is_mixed_as_llama_cpp_mixes_it():
    """16 layers: the first two, the last two, and every third from the fifth on; the head of a tied model, too."""
    assert [layer for layer in range(16) if use_more_bits(layer, 16)] == [0, 1, 4, 7, 10, 13, 14, 15]
    codecs = {name: codec for name, _, codec in SHAPES["llama-3.2-1b"].tensors("q4_k")}
    assert Counter(codecs.values()) == {"q4_k": 7 * 16 - 16, "q6_k": 17, "f32": 2 * 16 + 2}
    assert codecs["blk.4.attn_v.weight"] == codecs["blk.4.ffn_down.weight"] == codecs["token_embd.weight"] == "q6_k"
    untied = {name: codec for name, _, codec in SHAPES["llama-3.1-8b"].tensors("q4_k")}
    assert (untied["token_embd.weight"], untied["output.weight"]) == ("q4_k", "q6_k")
    assert {codec for _, _, codec in SHAPES["qwen3-4b"].tensors("q8_0")} == {"q8_0", "f32"}


@pytest.mark.parametrize("codec", CODECS)
def test_the_file_is_what_both_readers_take(codec, tiny):
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
        # Neither nothing nor anything that a trained model would not hold.
        assert np.isfinite(values).all() and 0.005 < np.abs(values).mean() <= 1


def test_the_file_is_made_once_and_again_when_it_is_another(tiny):
    path = make()
    os.utime(path, (1, 1))
    assert make() == path and path.stat().st_mtime == 1
    data = path.read_bytes()
    for other in (data[:-32], b"GGUF" + bytes(len(data) - 4)):
        path.write_bytes(other)
        make()
        assert path.read_bytes() == data
    assert make("q8_0") != path


def test_a_family_without_gguf_is_a_directory_that_is_quantised_when_it_is_cast(tiny):
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
    with pytest.raises(PipelineError, match="recurrent is quantised when it is cast, which --codec iq4_xs cannot be"):
        random_checkpoint.random_checkpoint("recurrent", "iq4_xs", lambda *_: None)


def test_an_interrupted_one_leaves_nothing(tiny):
    def interrupt(stage, done):
        if done > 0.3:
            assert stage == "making tiny.q4_k.gguf" and len(list(tiny.iterdir())) == 1
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(progress=interrupt)
    assert list(tiny.iterdir()) == []


def test_what_a_killed_process_left_is_removed_and_that_of_a_living_one_is_not(tiny):
    tiny.mkdir(parents=True)
    (tiny / ".tiny.q4_k.gguf.castiron-0123abcd").touch()
    with replacing(tiny / "other"):
        (alive,) = (path for path in tiny.iterdir() if path.name.startswith(".other"))
        make()
        assert sorted(tiny.iterdir()) == [alive, tiny / "tiny.q4_k.gguf"]


def test_the_room_that_it_takes_is_said_and_looked_for_before(tiny, monkeypatch, capsys):
    make()
    assert "castiron: tiny in q4_k: a random checkpoint of " in capsys.readouterr().err
    make()
    assert capsys.readouterr().err == ""
    usage = namedtuple("usage", "total used free")(1 << 30, 0, (1 << 28) + 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PipelineError, match=r"268\.4 MB are free: castiron cache clear makes room"):
        make("q8_0")
    assert [path.name for path in tiny.iterdir()] == ["tiny.q4_k.gguf"]


def test_rows_of_a_tile_differ_and_are_whole_blocks():
    rows = tiled_rows("q4_0", 64, 4096)
    assert rows.shape == (64, row_bytes("q4_0", 4096)) and len(np.unique(rows, axis=0)) == 64
    assert random_tile("q4_0").size % CODECS["q4_0"].block_bytes == 0


def test_bench_makes_compiles_and_measures_a_shape(tiny, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "FIRST_PROMPT", 8)
    options = ["--shape", "tiny", "--context", "64", "--prompt", "9", "--gen", "5", "--rounds", "1", "--threads", "1", "--json"]
    saved = str(tmp_path / "saved.json")
    assert cli.main(["bench", *options, "--numerics", "fast", "--save", saved]) == 0
    out, err = capsys.readouterr()
    result = read_json(out)
    assert set(result["castiron"]) == ENGINE_KEYS and result["castiron"]["prefill_peak_share"] > 0
    assert result["settings"]["model"] == "tiny.q4_k" and result["settings"]["numerics"] == "fast"
    assert "a random checkpoint" in err and "casting" in err
    assert cli.main(["bench", *options, "--numerics", "fast", "--baseline", saved]) == 0
    out, err = capsys.readouterr()
    assert err == "" and {row["of"] for row in read_json(out)["baseline"]["figures"]} == {"castiron"}
    (bundle,) = (tmp_path / "cache" / "bundles").iterdir()
    assert (bundle / "manifest.json").exists() and len(list(tiny.iterdir())) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give a bundle DIR, --shape NAME, or --kernel"),
        (["--shape", "llama-9"], "it takes llama-3.2-1b, llama-3.1-8b"),
        (["--shape", "tiny", "--codec", "q1_k"], "--codec q1_k is not known: it takes f32"),
        (["--shape", "tiny", "--tokens", "4"], "--tokens are those of a --kernel"),
        (["--shape", "tiny", "--speculation"], "leave --speculation out"),
        (["--shape", "tiny", "--checkpoint", "x"], "leave --checkpoint out"),
        (["--shape", "tiny", "--context", "0"], "--context is 0"),
        (["--shape", "tiny", "--numerics", "rough"], "numerics 'rough' is not one of exact, canonical, fast"),
        (["--shape", "tiny", "--context", "100"], "this needs 512 positions"),
        (["DIR", "--shape", "tiny"], "leave DIR out"),
        (["DIR", "--codec", "q4_k"], "leave --codec out"),
        (["DIR", "--baseline", "/no/such.json"], "/no/such.json cannot be read"),
        (["--kernel", "gemm"], "--kernel gemm needs its --shape"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(options, says, capsys):
    assert cli.main(["bench", *options]) == 1
    out, err = capsys.readouterr()
    assert out == "" and says in err.splitlines()[-1] and "Traceback" not in err
