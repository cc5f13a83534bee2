"""No checkpoint does more than be refused, in a sentence: mutants of sound ones (`hostile.py`), and what was seen to do harm."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from castiron.pipelines import cli
from castiron.pipelines.casting.calibrate import chunks_of
from castiron.pipelines.checkpoints import CheckpointError, open_checkpoint
from castiron.pipelines.errors import user_errors
from tests.pipelines import hostile
from tests.pipelines.hostile_mutants import RAW, dumped, mutant, source_of
from tests.pipelines.hostile_sound import write_sound
from tests.pipelines.tiny_gguf import write_llama

FAMILIES = ("llama", "gemma3_text", "gemma4_text", "glm4_moe_lite", "gpt_oss", "falcon_h1", "lfm2", "llama with yarn",
            "llama with longrope")  # fmt: skip
MUTANTS = 60
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_sound(tmp_path_factory.mktemp("sound"), FAMILIES)


@pytest.fixture
def llama(sound, tmp_path):
    """A directory to spoil."""
    return shutil.copytree(next(path for path in sound if path.name == "llama"), tmp_path / "llama")


def test_sound_ones_are_taken(sound):
    assert {path.name: hostile.verdict(path) for path in sound} == {path.name: "taken" for path in sound}


def test_mutants_are_taken_or_refused(sound, tmp_path):
    found = {}
    for number in range(MUTANTS):
        (place := tmp_path / str(number)).mkdir()
        found[number] = hostile.limited(mutant(number, source_of(number, sound), place))
        shutil.rmtree(place)
    assert {number: said for number, said in found.items() if not hostile.fine(said)} == {}
    assert "taken" in found.values() and len(set(found.values())) > 20


def test_the_corpus_is_taken_or_refused():
    """What did harm once, and a mutant of each place in the sources that refuses some; one may end its process."""
    command = [sys.executable, "-m", "tests.pipelines.hostile", "--replay"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counts, kept = json.loads(done.stdout.splitlines()[-1]), len(hostile.corpus())
    assert counts.pop("places") > 0.8 * kept > 64 and sum(counts.values()) == kept


def change(directory, file="config.json", **keys):
    path = directory / file
    path.write_bytes(dumped(json.loads(path.read_text()) | keys))


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"rope_theta": 0}, "'rope_theta' in the llama config is 0, which is not above 0"),
        ({"rope_theta": -1.0}, "is -1.0, which is not above 0"),
        ({"rope_theta": float("nan")}, "is nan, which is not a number of f32"),
        ({"rope_theta": 1.0}, "is 1.0, which is not a number above 1"),
        ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' in the llama config is -1e-05, which is not above 0"),
        ({"rms_norm_eps": float("inf")}, "is inf, which is not a number of f32"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "'factor' in a rope scaling is 0, which is not a number above 0"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "'factor' in a rope scaling is '8'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "which is not below its high_freq_factor 1.0"),
        ({"rope_scaling": {**YARN, "factor": {"a": 1}}}, "'factor' in a rope scaling is {'a': 1}"),
        ({"rope_scaling": {**YARN, "beta_fast": [1]}}, "'beta_fast' in a rope scaling is [1]"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1e400}}, "not a whole number of at least 2"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "'rope_type' in a rope scaling is ['yarn'], which is not a word"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [0] * 8, "short_factor": [1] * 8}}, "'long_factor'"),
        ({"model_type": "stablelm", "partial_rotary_factor": 1e-5}, "'partial_rotary_factor' leaves none"),
        ({"model_type": ["llama"]}, "names no model_type"),
        ({"model_type": "x" * 5000}, "is not supported"),
        ({"layer_types": [[]]}, "which is neither a list of words nor one of numbers"),
        ({"num_hidden_layers": 10**12}, "has tensors of 3 layers"),
        ({"max_position_embeddings": 10**30}, "which is more than 2147483647"),
        ({"x": RAW + "0"}, "config.json is not JSON"),
        ({"id2label": RAW + "5"}, "config.json is not JSON"),
        ({"architectures": "\ud800"}, "config.json is not JSON"),
        ({"a\x1b[2J": 1, "hidden_act": "a\x1b[2J\n" * 1000}, "supported are silu"),
    ],
)  # fmt: skip
def test_configs_that_were_taken_or_did_harm(llama, keys, says):
    if "layer_types" in keys:
        keys = {"model_type": "qwen3", **keys}
    change(llama, **keys)
    assert says in refusal(llama)


def refusal(path) -> str:
    """The sentence with which a checkpoint is refused."""
    start = time.process_time()
    with pytest.raises(user_errors()) as error:
        hostile.read_whole(path)
    said = str(error.value).replace(str(path), "PATH")
    assert len(said) < hostile.LONGEST and said.isprintable() and time.process_time() - start < hostile.SECONDS
    return str(error.value)


def test_in_place_of_a_file(llama):
    """A pipe is not waited for, a device without an end is not read, neither by what asks whether there is a bundle."""
    for name in ("config.json", "tokenizer.json", "generation_config.json", "chat_template.jinja", "manifest.json"):
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
            path = llama / name
            before = path.read_bytes() if path.exists() else None
            path.unlink(missing_ok=True)
            make(path)
            assert cli.main(["inspect", str(llama)]) == int(name != "manifest.json")
            path.rmdir() if path.is_dir() else path.unlink()
            if before is not None:
                path.write_bytes(before)


def compiled(path, tmp_path, capsys) -> str:
    """What compile says of a checkpoint that it refuses before it compiles anything."""
    assert cli.main(["compile", str(path), "-o", str(tmp_path / "out")]) == 1
    out, err = capsys.readouterr()
    assert out == "" and not (tmp_path / "out").exists() and len(err.replace(str(path), "")) < hostile.LONGEST
    return err


@pytest.mark.parametrize("eos", [40, -1, 10**20])
def test_ids_past_the_vocabulary(llama, eos, tmp_path, capsys):
    change(llama, "generation_config.json", eos_token_id=[2, eos])
    assert f"eos_token_id is {eos}, outside the vocabulary of 40" in compiled(llama, tmp_path, capsys)


def test_weights_that_are_no_numbers(llama, capsys):
    file = llama / "model.safetensors"
    weights = load_file(file)
    for value in (np.nan, np.inf, -np.inf):
        name = "model.layers.2.mlp.up_proj.weight"
        spoilt = weights[name].copy()
        spoilt[3, 5] = value
        save_file(weights | {name: spoilt}, file)
        assert f"{name} holds infinities or what is no number" in refusal(llama)
    # So says what compiles nothing.
    assert cli.main(["diff", str(llama), "--tokens", "1,2"]) == 1 and "holds infinities" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//////////////8="}}, "library fails on"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b"}}, "library fails on"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}] * 6}},
         "library fails on"),
        ({"model": None}, "no tokenizer that can be read"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 40}, "unk_token": "a"}}, "one is 40, of 40 in all"),
        ({"normalizer": RAW + "5"}, ""),
    ],
)  # fmt: skip
def test_tokenizers_that_end_the_process(llama, part, says):
    change(llama, "tokenizer.json", **part)
    assert says in refusal(llama)


def test_what_reads_a_tokenizer_by_itself_does_not_end_with_it(llama, tmp_path, capsys):
    """The library would end this process."""
    change(llama, "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "//////////////8="})
    (tmp_path / "text").write_text("ab " * 500)
    assert cli.main(["diff", str(llama), "-p", "ab"]) == 1
    assert "a tokenizer that the tokenizers library fails on" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="library fails on"):
        chunks_of(open_checkpoint(llama), tmp_path / "text")


def test_vocabularies_of_long_tokens(tmp_path):
    """Of tokens a, aa, ... every part is one; a token of a megabyte has as many parts."""
    for tokens, says in (
        (["a" * n for n in range(1, 4000)], "too long to be those of SentencePiece"),
        (["a" * 10**6], "1,000,000 characters"),
    ):
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.5] * len(tokens),
        }
        assert says in refusal(write_llama(tmp_path / "tiny.gguf", metadata))


def test_many_names_are_read_once(llama):
    """20,000 tensors of a family that holds some otherwise, and one name twice."""
    entries = {
        f"model.layers.0.mlp.experts.{n}.x": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n in range(20_000)
    }
    header = json.dumps(entries).encode()
    change(llama, model_type="gpt_oss")
    for head in (
        header,
        header[:-1]
        + b', "model.layers.0.mlp.experts.7.x": '
        + json.dumps(entries["model.layers.0.mlp.experts.7.x"]).encode()
        + b"}",
    ):
        (llama / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + b"\0" * 80_000)
        refusal(llama)


def test_experts_that_are_no_matrices_stay_as_they_are(llama):
    change(llama, model_type="gpt_oss")
    names = {"gate_up_proj": (3,), "down_proj": (3, 4), "gate_up_proj_bias": (3,), "down_proj_bias": (5000, 2)}
    save_file(
        {f"model.layers.0.mlp.experts.{name}": np.ones(shape, np.float32) for name, shape in names.items()},
        llama / "model.safetensors",
    )
    assert set(open_checkpoint_names(llama)) == {f"model.layers.0.mlp.experts.{name}" for name in names}


def open_checkpoint_names(path):
    change(
        path,
        num_hidden_layers=1,
        vocab_size=2,
        hidden_size=2,
        intermediate_size=2,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    return open_checkpoint(path).tensors


def test_values_beyond_number_are_counted_before_they_are_read(llama):
    """Each takes thirty times its own bytes."""
    for name in ("config.json", "tokenizer.json"):
        (before := (llama / name)).rename(llama / "before")
        before.write_bytes(b'{"model_type": "llama", "x": [' + b"[]," * 2_100_000 + b"0]}")
        assert f"{name} holds more values than any file of a model does" in refusal(llama)
        (llama / "before").replace(before)
    head = b'{"__metadata__": {"a": "' + b"," * 1_000_001 + b'"}}'
    (llama / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head)
    assert "holds more tensors than any file of a model does" in refusal(llama)


def test_more_dimensions_than_arrays_have(llama):
    head = b'{"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": [' + b"1," * 99 + b"1]}}"
    (llama / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(4))
    assert "100 dimensions" in refusal(llama)


def test_a_folder_that_no_file_system_knows(llama):
    modules = [("", "Transformer"), ("1\0", "Pooling")]
    content = [{"idx": n, "path": path, "type": f"x.{kind}"} for n, (path, kind) in enumerate(modules)]
    (llama / "modules.json").write_text(json.dumps(content))
    assert "does not name the type and the folder of each module" in refusal(llama)
