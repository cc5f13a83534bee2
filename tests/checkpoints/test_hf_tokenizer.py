"""Tokenizer directories are read as AutoTokenizer reads them: ids, decoding, special tokens, templates."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from castiron.pipelines.checkpoints.chat_templates import join_templates
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.hf.open_directory import small_files
from castiron.pipelines.checkpoints.hf.tokenizer_files import HfTokenizer, read_tokenizer
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.chat_template import render
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle.token_table import table_of
from tests.support.tokenizer_directories import TEMPLATES, base, class_directories, directories, vocabularies, write

TEXTS = (
    "the <s>cat</s> sat <|im_start|> x1 <image><tool_call>12",
    "<|endoftext|>  <pad> <unk>the<think>mat [INST] <eos>\n<|im_end|>Ångström x1x",
)
MESSAGES = [{"role": "user", "content": "hi <s>"}, {"role": "assistant", "content": "the cat\n"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def _read(folder: Path) -> HfTokenizer:
    return read_tokenizer(folder, json.loads((folder / "config.json").read_text()))


def _chat(found: HfTokenizer, tools: list | None) -> str | None:
    try:
        return found.chat_template and render(
            found.chat_template, MESSAGES, special_tokens=found.special_tokens, tools=tools, add_generation_prompt=True
        )
    except PipelineError:
        return None


def _peer_chat(peer: AutoTokenizer, tools: list | None) -> str | None:
    try:
        return peer.apply_chat_template(MESSAGES, tools=tools, tokenize=False, add_generation_prompt=True)
    except ValueError:  # no template, or none for requests without tools
        return None


def _compare(files: Mapping[str, str]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = write(Path(name), files)
        peer, found = AutoTokenizer.from_pretrained(folder), _read(folder)
    assert small_files(files) == list(files)
    assert dict(found.special_tokens) == peer.special_tokens_map
    backend = Backend.from_str(json.dumps(found.content))
    backend.no_truncation()
    backend.no_padding()
    assert {n: repr(token) for n, token in backend.get_added_tokens_decoder().items()} == {
        n: repr(token) for n, token in peer.added_tokens_decoder.items()
    }
    assert found.ids("eos_token") == ([] if peer.eos_token is None else [peer.eos_token_id])
    for text in TEXTS:
        for special in (False, True):
            ids = peer(text, add_special_tokens=special)["input_ids"]
            assert backend.encode(text, add_special_tokens=special).ids == ids
            assert backend.decode(ids, skip_special_tokens=special) == peer.decode(ids, skip_special_tokens=special)
    for tools in (None, TOOLS):
        assert _chat(found, tools) == _peer_chat(peer, tools)
    # The table is left out only for models that it cannot represent.
    assert (table_of(found.content) is None) == (found.content["model"]["type"] != "BPE")


@settings(max_examples=50)
@given(directories())
def test_a_directory_equals_autotokenizer(files):
    _compare(files)


@settings(max_examples=40)
@given(class_directories())
def test_a_directory_of_a_known_class_equals_autotokenizer(files):
    _compare(files)


@settings(max_examples=40)
@given(vocabularies())
def test_a_directory_with_vocab_and_merges_equals_autotokenizer(files):
    _compare(files)


@settings(max_examples=3000)
@given(st.one_of(directories(), class_directories(), vocabularies()))
def test_many_directories_equal_autotokenizer(files):
    _compare(files)


FILES = {"config.json": '{"model_type": "llama"}', "tokenizer.json": base("gpt2")}


ENDINGS = ("\n", "\n\n", " ", "  {% if tools %}a{% endif %}", "{{ '' }}", "x\n  ", "{# c #}\n", "-%}")


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_joined_templates_render_as_each_of_them(tools):
    texts = [*TEMPLATES, *ENDINGS, *(f"{start}y{end}" for start in ENDINGS for end in ENDINGS)]
    for default, tool_use in zip(texts, [*reversed(texts)]):
        given = {"special_tokens": {"eos_token": "</s>"}, "tools": tools}
        expected = render(tool_use if tools else default, MESSAGES, **given)
        assert render(join_templates(default, tool_use), MESSAGES, **given) == expected


def test_a_template_in_chat_template_json_is_found(tmp_path):
    folder = write(tmp_path, {**FILES, "chat_template.json": '{"chat_template": "old"}'})
    assert _read(folder).chat_template == "old"
    write(folder, {"tokenizer_config.json": '{"chat_template": "new"}'})
    assert _read(folder).chat_template == "new"


def test_a_template_only_for_tools_rejects_other_requests(tmp_path):
    found = _read(write(tmp_path, {**FILES, "additional_chat_templates/tool_use.jinja": "{{ tools }}\n"}))
    assert render(found.chat_template, MESSAGES, tools=[1]) == "[1]"
    with pytest.raises(PipelineError, match="only for requests with tools"):
        render(found.chat_template, MESSAGES)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_vocabulary_that_castiron_cannot_read_is_named(name, tmp_path):
    folder = write(tmp_path, {"config.json": FILES["config.json"], name: "{}"})
    with pytest.raises(CheckpointError, match=rf"has the tokenizer {name} but no tokenizer.json; save it with transformers"):
        _read(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_config.json": '{"bos_token": 5}'}, "has the special token 5, which is not a text"),
        ({"tokenizer_config.json": '{"added_tokens_decoder": {"x": "a"}}'}, "added_tokens_decoder has id x, not a number"),
        ({"added_tokens.json": '{"<a>": "7"}'}, "the id of <a> is '7'"),
    ],
)
def test_malformed_special_tokens_are_named(files, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        _read(write(tmp_path, {**FILES, **files}))


ODD = (None, True, 5, -1, 1.5, "x", "", [], {}, [None], ["a", 5], {"a": 1}, {"content": 5}, [[]], 10**30)


def _changed(value: object, random: Random) -> object:
    """Return a copy of a JSON value with one odd value in it."""
    if isinstance(value, dict) and value and random.random() < 0.8:
        key = random.choice([*value])
        return {**value, key: _changed(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.8:
        index = random.randrange(len(value))
        return [*value[:index], _changed(value[index], random), *value[index + 1 :]]
    return random.choice(ODD)


@settings(max_examples=50)
@given(st.one_of(directories(), vocabularies()), st.randoms(use_true_random=False))
def test_a_damaged_file_ends_in_one_line(files, random):
    names = [name for name in files if name.endswith(".json")]
    name = random.choice([name for name in names if name not in ("config.json", "vocab.json")] or names)
    with tempfile.TemporaryDirectory() as folder:
        value = _changed(json.loads(files[name]), random)
        try:
            read_tokenizer(write(Path(folder), {**files, name: json.dumps(value)}), json.loads(files["config.json"]))
        except CheckpointError as error:
            assert "\n" not in str(error)


ENDS = [
    # ids of generation_config.json, ids of config.json, eos_token; ids of the stop set. 2 is <|endoftext|>, 300 is <|im_end|>.
    ([1], None, None, (1,)),
    ([1], None, "<|im_end|>", (1, 300)),
    (None, None, "<|im_end|>", (300,)),
    (None, 1, "<|im_end|>", (300, 1)),
    (2, [1, 2], "<|im_end|>", (2, 300, 1)),
    # 77 is an ordinary token: config.json has the default of a class.
    (None, 77, "<|im_end|>", (300,)),
    (None, 77, None, (77,)),
]


@pytest.mark.parametrize(("generation", "config", "text", "expected"), ENDS)
def test_the_stop_tokens_are_those_of_all_files(generation, config, text, expected, tmp_path):
    folder = tiny_model("llama", tmp_path, vocab_size=301, eos_token_id=config, bos_token_id=None)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    content = json.loads(base("gpt2"))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = {0: "<s>", 1: "</s>", 2: "<|endoftext|>", 300: "<|im_end|>"}
    content["added_tokens"] = [{"id": n, "content": text, **flags, "special": True} for n, text in added.items()]
    write(folder, {"tokenizer.json": json.dumps(content), "tokenizer_config.json": json.dumps({"eos_token": text})})
    assert open_checkpoint(folder).eos_token_ids == expected


def test_an_end_token_without_a_row_in_the_embedding_is_left_out(tmp_path):
    folder = tiny_model("llama", tmp_path, vocab_size=300, eos_token_id=1, bos_token_id=None)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write(folder, {"tokenizer.json": base("gpt2"), "tokenizer_config.json": '{"eos_token": "<|im_end|>"}'})
    found = open_checkpoint(folder)
    assert found.eos_token_ids == (1,) and found.special_tokens == {"eos_token": "<|im_end|>"}
    ids = Backend.from_str(json.dumps(found.tokenizer)).encode("<|im_end|>").ids
    assert len(ids) > 1 and max(ids) < 300
