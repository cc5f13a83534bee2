"""Damaged and hostile checkpoints are accepted, or rejected with a one-line error."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf.gguf_file import metadata_entry, read_gguf, write_gguf
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile import compile_model
from castiron.pipelines.compile.build_model import build_model, open_source
from castiron.pipelines.compile.calibration import chunks_of
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import user_errors
from tests.support import hostile_checkpoints as hostile
from tests.support.hostile import ACCEPTED, LONGEST, REJECTED, fine, verdict
from tests.support.hostile_mutants import RAW, dumped, source_of
from tests.support.tiny_gguf import HIDDEN, LAYERS, write_llama
from tests.support.valid_checkpoints import HYBRIDS, write_valid

FAMILIES = ("llama", "gemma3_text", "gemma4_text", "glm4_moe_lite", "gpt_oss", "falcon_h1", "lfm2", "llama with yarn",
            "llama with longrope")  # fmt: skip
MUTANTS = 60
OPTIONS = Options(prefill=(8,), batch=(), verify_widths=(), lowering="portable", tuned=False)


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return write_valid(tmp_path_factory.mktemp("sound"), FAMILIES)


@pytest.fixture
def llama(valid, tmp_path):
    """A directory that the test may damage."""
    return shutil.copytree(next(path for path in valid if path.name == "llama"), tmp_path / "llama")


def test_valid_checkpoints_are_accepted(valid):
    assert {path.name: verdict(path, hostile.read_fully) for path in valid} == {path.name: ACCEPTED for path in valid}


def test_mutants_are_accepted_or_rejected(valid):
    found = {number: hostile.verdict_on(number, source_of(number, valid)) for number in range(MUTANTS)}
    assert {number: message for number, message in found.items() if not fine(message)} == {}
    assert ACCEPTED in found.values() and len(set(found.values())) > 20


@pytest.mark.parametrize("family", HYBRIDS)
def test_invalid_sizes_of_hybrids_are_rejected(family, valid, tmp_path):
    """Every number in a recurrent layer's metadata may be missing or wrong; memory stays small."""
    source = next(path for path in valid if path.name == f"hybrid_{family}.gguf")
    entries, found = read_gguf(source).metadata, {}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for key in (key for key in entries if re.search(r"ssm|l_cache|interval|_count|_length|dimension", key)):
        for value in (None, 0, 1, 3, 5, 60_000_000, [1, 2], "x"):
            metadata = {name: other for name, other in entries.items() if name != key}
            path = rewritten(source, metadata | ({} if value is None else {key: value}), tmp_path / "mutant.gguf")
            if not fine(message := verdict(path, read_tensors)):
                found[f"{key} = {value}"] = message
    assert found == {}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000


def read_tensors(path: Path) -> None:
    checkpoint = open_source(path, OPTIONS)
    build_model(checkpoint, OPTIONS)
    for tensor in checkpoint.tensors.values():
        assert tensor.data.size


def rewritten(source: Path, metadata: dict, path: Path) -> Path:
    """Write a GGUF file with the tensors of `source` and other metadata."""
    file = read_gguf(source)
    with open(path, "wb") as out:
        values = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in metadata.items()}
        write_gguf(
            out, [metadata_entry(key, value) for key, value in values.items()], [*file.tensors.values()], lambda done: None
        )
    return path


def test_the_corpus_is_accepted_or_rejected(tmp_path):
    """Files that once did harm, and a mutant for each line of the sources that rejects one."""
    sources, corpus = {path.name: path for path in hostile.sources(tmp_path / "valid")}, hostile.corpus()
    found = [(name, number, hostile.verdict_on(number, sources[name])) for name, number in corpus]
    assert [each for each in found if not fine(each[2])] == []
    lines = {message for _, _, message in found if message.startswith(REJECTED)}
    assert len(lines) > 0.8 * len(corpus) > 64


def change(directory, file="config.json", **keys):
    path = directory / file
    path.write_bytes(dumped(json.loads(path.read_text()) | keys))


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("keys", "expected_message"),
    [
        ({"rope_theta": 0}, "'rope_theta' in the llama config is 0; it must be above 0"),
        ({"rope_theta": float("nan")}, "is nan; it must be in the range of f32"),
        ({"rope_theta": 1.0}, "is 1.0; it must be a number above 1"),
        ({"rms_norm_eps": -1e-5}, "'rms_norm_eps' in the llama config is -1e-05; it must be above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "'factor' in a rope scaling is 0; it must be a number above 0"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "'factor' in a rope scaling is '8'"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "it must be below high_freq_factor 1.0"),
        ({"rope_scaling": {**YARN, "factor": {"a": 1}}}, "'factor' in a rope scaling is {'a': 1}"),
        ({"rope_scaling": {**YARN, "original_max_position_embeddings": 1e400}}, "must be an integer of at least 2"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, "'rope_type' in a rope scaling is ['yarn']; it must be a string"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [0] * 8, "short_factor": [1] * 8}}, "'long_factor'"),
        ({"model_type": "stablelm", "partial_rotary_factor": 1e-5}, "increase 'partial_rotary_factor'"),
        ({"model_type": ["llama"]}, "has no model_type"),
        ({"model_type": "x" * 5000}, "is not supported"),
        ({"layer_types": [[]]}, "it must be a list of strings or a list of numbers"),
        *(({"num_hidden_layers": layers}, "the tensors have 3 layers") for layers in (4, 10**12, 10**400)),
        *(({key: 10**12}, f"{key} is 1000000000000, but no tensor is longer than") for key in SIZES),
        ({"max_position_embeddings": 10**30}, "it must be at most 2147483647"),
        ({"x": RAW + "0"}, "config.json is not valid JSON"),
        ({"id2label": RAW + "5"}, "config.json nests values deeper"),
        ({"architectures": "\ud800"}, "config.json is not valid JSON"),
        ({"a\x1b[2J": 1, "hidden_act": "a\x1b[2J\n" * 1000}, "supported are silu"),
    ],
)  # fmt: skip
def test_harmful_configs_are_rejected(llama, keys, expected_message):
    if "layer_types" in keys:
        keys = {"model_type": "qwen3", **keys}
    change(llama, **keys)
    assert expected_message in refusal(llama)


def refusal(path) -> str:
    """Return the error of a checkpoint, which must be short, printable and quick."""
    start = time.process_time()
    with pytest.raises(user_errors()) as error:
        hostile.read_fully(path)
    message = str(error.value).replace(str(path), "PATH")
    assert len(message) < LONGEST and message.isprintable() and time.process_time() - start < hostile.SECONDS
    return str(error.value)


def test_more_experts_than_the_tensors_have_are_rejected(valid, tmp_path):
    directory = shutil.copytree(next(path for path in valid if path.name == "gpt_oss"), tmp_path / "gpt_oss")
    change(directory, num_local_experts=10**12)
    assert "num_local_experts is 1000000000000, but the tensors have" in refusal(directory)


@pytest.mark.parametrize(
    ("key", "expected_message"),
    [
        ("block_count", f"num_hidden_layers is 2147483647, but the tensors have {LAYERS + 1} layers"),
        ("embedding_length", "hidden_size is 2147483647, but no tensor is longer than"),
        ("feed_forward_length", "intermediate_size is 2147483647, but no tensor is longer than"),
        ("attention.head_count", "num_attention_heads is 2147483647, but no tensor is longer than"),
    ],
)
def test_impossible_sizes_in_gguf_metadata_are_rejected(key, expected_message, tmp_path):
    """Layer numbers in tensors' names are no more trusted: a high one counts as one layer."""
    high = {"blk.999999999.attn_norm.weight": np.ones(HIDDEN, np.float32)}
    path = write_llama(tmp_path / "tiny.gguf", {f"llama.{key}": 2**31 - 1, "llama.attention.head_count_kv": 1}, high)
    assert expected_message in refusal(path)


def test_pipes_and_devices_in_place_of_files_are_not_read(llama):
    """Reading neither waits for a pipe nor reads an endless device."""
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


@pytest.mark.parametrize("eos", [40, -1, 10**20])
def test_token_ids_outside_the_vocabulary_are_rejected(llama, eos):
    change(llama, "generation_config.json", eos_token_id=[2, eos])
    assert f"eos_token_id is {eos}, outside the vocabulary of 40" in refusal(llama)


def test_infinite_weights_are_rejected(llama, capsys):
    file = llama / "model.safetensors"
    weights = load_file(file)
    for value in (np.nan, np.inf, -np.inf):
        name = "model.layers.2.mlp.up_proj.weight"
        spoilt = weights[name].copy()
        spoilt[3, 5] = value
        save_file(weights | {name: spoilt}, file)
        assert f"{name} has infinities or NaNs" in refusal(llama)
    assert cli.main(["compile", str(llama), "-o", str(llama / "out")]) == 1 and not (llama / "out").exists()
    assert "has infinities" in capsys.readouterr().err
    # A command that compiles nothing checks them too.
    assert cli.main(["diff", str(llama), "--tokens", "1,2"]) == 1 and "has infinities" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "expected_message"),
    [
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "//////////////8="}}, "library fails on"),
        ({"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "b"}}, "library fails on"),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 2000}] * 6}},
         "library fails on"),
        ({"model": None}, "its tokenizer cannot be read"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 40}, "unk_token": "a"}}, "has id 40, but the vocabulary has 40 tokens"),
        ({"normalizer": RAW + "5"}, ""),
    ],
)  # fmt: skip
def test_tokenizers_that_end_the_process(llama, part, expected_message):
    change(llama, "tokenizer.json", **part)
    assert expected_message in refusal(llama)


def test_an_invalid_tokenizer_ends_packing(llama, capsys, monkeypatch):
    """The tokenizer is checked while weights are packed."""
    reports = []

    def packing(path, checkpoint, module, importance, progress, more):
        path.write_bytes(b"a part")
        while len(reports) < 6000:
            reports.append(progress(0.5))
            time.sleep(0.01)

    monkeypatch.setattr(compile_model, "write_parameters", packing)
    change(llama, "tokenizer.json", model={"type": "WordLevel", "vocab": {"a": 40}, "unk_token": "a"})
    before = sorted(llama.parent.rglob("*"))
    assert cli.main(["compile", str(llama), "-o", str(llama.parent / "out")]) == 1
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert "has id 40, but the vocabulary has 40 tokens" in message
    assert len(reports) < 6000 and sorted(llama.parent.rglob("*")) == before


def test_a_tokenizer_that_aborts_ends_no_command(llama, tmp_path, capsys):
    """The library would abort this process, so it runs in a child process."""
    change(llama, "tokenizer.json", normalizer={"type": "Precompiled", "precompiled_charsmap": "//////////////8="})
    (tmp_path / "text").write_text("ab " * 500)
    assert cli.main(["diff", str(llama), "-p", "ab"]) == 1
    assert "the tokenizers library fails on its tokenizer" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="library fails on"):
        chunks_of(open_checkpoint(llama), tmp_path / "text")


def test_vocabularies_of_long_tokens_are_rejected(tmp_path):
    """Every part of the tokens a, aa, ... is a token; a token of a megabyte has a million parts."""
    for tokens in (["a" * n for n in range(1, 4000)], ["a" * 10**6]):
        metadata = {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [0.5] * len(tokens),
        }
        assert "too long for a SentencePiece vocabulary" in refusal(write_llama(tmp_path / "tiny.gguf", metadata))


def test_twenty_thousand_names_are_read_in_time(llama):
    """20,000 tensors whose names match a layout of the family, and one name twice."""
    entries = {
        f"model.layers.0.mlp.experts.{n}.x": {"dtype": "F32", "shape": [1], "data_offsets": [4 * n, 4 * n + 4]}
        for n in range(20_000)
    }
    header, again = json.dumps(entries).encode(), json.dumps(dict([entries.popitem()])).encode()
    change(llama, model_type="gpt_oss")
    for head in (header, header[:-1] + b", " + again[1:]):
        write_header(llama, head, 80_000)
        assert "num_hidden_layers is 3, but the tensors have 1 layers" in refusal(llama)


def write_header(directory, head: bytes, size: int) -> None:
    """Write a safetensors file with the header `head` and `size` bytes of data."""
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(size))


def test_experts_of_other_ranks_stay_as_they_are(llama):
    sizes = dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2)
    sizes |= dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    change(llama, model_type="gpt_oss", **sizes)
    shapes = {"gate_up_proj": (3,), "down_proj": (3, 4), "gate_up_proj_bias": (3,), "down_proj_bias": (5000, 2)}
    tensors = {f"model.layers.0.mlp.experts.{name}": np.ones(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, llama / "model.safetensors")
    assert open_checkpoint(llama).tensors.keys() == tensors.keys()


def test_too_many_json_values_are_rejected_before_parsing(llama):
    """A parsed value takes thirty times the memory of its text."""
    for name in ("config.json", "tokenizer.json"):
        (before := (llama / name)).rename(llama / "before")
        before.write_bytes(b'{"model_type": "llama", "x": [' + b"[]," * 2_100_000 + b"0]}")
        assert f"{name} has more JSON values than castiron reads" in refusal(llama)
        (llama / "before").replace(before)
    write_header(llama, b'{"__metadata__": {"a": "' + b"," * 1_000_001 + b'"}}', 0)
    assert "its header has more than" in refusal(llama)
    write_header(llama, b'{"a": {"dtype": "F32", "data_offsets": [0, 4], "shape": [' + b"1," * 99 + b"1]}}", 4)
    assert "100 dimensions" in refusal(llama)


def test_invalid_folder_names_are_rejected(llama):
    modules = [("", "Transformer"), ("1\0", "Pooling")]
    content = [{"idx": n, "path": path, "type": f"x.{kind}"} for n, (path, kind) in enumerate(modules)]
    (llama / "modules.json").write_text(json.dumps(content))
    assert "lacks a valid type or path" in refusal(llama)
