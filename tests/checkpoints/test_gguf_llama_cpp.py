"""GGUF tokenizers split text, and end answers, as llama.cpp's do.

`python -m tests.models.llama_cpp_vocabularies` records what llama.cpp gives, and compares with it
on real vocabularies.
"""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf.export import export_tokenizer
from castiron.pipelines.checkpoints.gguf.tokenizer_json import tokenizer_json
from castiron.pipelines.checkpoints.gguf.vocabulary import eos_token_ids
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.checkpoints.pre_tokenizers import PRE_TOKENIZERS
from tests.support.llama_cpp_texts import RECORDED, byte_level, gguf_of, header, is_comparable, made_vocabulary
from tests.support.tiny_gguf import write_llama

EXPECTED = json.loads(RECORDED.read_text(encoding="utf-8"))


def tokenizer_of(metadata: dict) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(tokenizer_json(gguf_of(metadata))))


def test_all_names_of_llama_cpp_are_known():
    # llama.cpp aborts at the first space of a "gpt2" vocabulary with the name whitespace.
    assert {*EXPECTED["names"]} == {*PRE_TOKENIZERS, "whitespace"}


@pytest.mark.parametrize("name", [*PRE_TOKENIZERS, None])
def test_a_pre_tokenizer_splits_as_llama_cpps(name):
    """Merges were learned across words, so ids show where words end; None: no key."""
    tokenizer, compared = tokenizer_of(made_vocabulary(EXPECTED["merges"], name)), 0
    for text, outcomes, at in zip(EXPECTED["texts"], EXPECTED["outcomes"], EXPECTED["chosen"][name or ""], strict=True):
        assert (at >= 0) == is_comparable(name or "default", text)
        if at >= 0:
            compared += 1
            assert tokenizer.encode(text, add_special_tokens=False).ids == outcomes[at], text
    assert compared > 4


@pytest.mark.parametrize("spec", EXPECTED["headers"], ids=lambda spec: f"{spec['model']}-{len(spec['special'])}")
def test_special_tokens_and_ends_are_llama_cpps(spec):
    metadata = header(spec)
    tokenizer = tokenizer_of(metadata)
    for text, ids in zip(spec["texts"], spec["ids"], strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
    assert sorted(eos_token_ids(gguf_of(metadata))) == spec["ends"]


# Words by the models' tokenizer.json, where llama.cpp has others.
WORDS = {
    ("kimi-k2", "helloWorld你好12345"): ["hello", "World", "你好", "123", "45"],
    ("kimi-k2", "ÉtéÀ IT's"): ["Été", "À", " IT's"],
    ("youtu", "helloWorld 12"): ["hello", "World", " ", "1", "2"],
    ("tiny_aya", "  1234567 aB"): ["  ", "1", "234", "567", " a", "B"],
    ("tekken", "étÉ cafe\u0301s"): ["ét", "É", " cafe\u0301s"],
    ("gpt-4o", "étÉ's 1234"): ["ét", "É's", " ", "123", "4"],
    ("granite-embed-multi-97m", "étÉ"): ["ét", "É"],
    ("deepseek-coder", "a\u3000世界"): ["a", "\u3000世界"],
    ("deepseek-llm", "12 \u3000"): ["1", "2", " ", "\u3000"],
    ("chameleon", "aIMGIMGABZb"): ["a", "IMGIMGABZ", "b"],
    ("superbpe", "12345１２"): ["1", "234", "5１２"],
}


@pytest.mark.parametrize(("name", "text"), WORDS)
def test_words_are_those_of_tokenizer_json(name, text):
    pairs = tokenizer_of(byte_level(["a b"], name)).pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in pairs] == WORDS[name, text]


def small(**more) -> dict:
    """A vocabulary whose tokens 11 and 12 are "," and <s>; more: keys to add or, if None, to remove."""
    tokens = [*"abcdefghijk,", "<s>", "</x>", "<|user|>", "Ġ", "Ċ"]
    keys = {"model": "gpt2", "pre": "gpt-2", "tokens": tokens, "token_type": [1] * 12 + [3] * 3 + [1] * 2}
    keys |= {"merges": ["a b"], "bos_token_id": 12, "eos_token_id": 13} | more
    keys["tokens"] = [*keys["tokens"], "ab"]
    keys["token_type"] = [*keys["token_type"], 1]
    return {key if "." in key else f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def test_a_missing_pre_tokenizer_is_a_warning(tmp_path, capsys):
    open_checkpoint(write_llama(tmp_path / "x.gguf", small()))
    assert capsys.readouterr().err == ""
    found = open_checkpoint(write_llama(tmp_path / "y.gguf", small(pre=None)))
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{tmp_path / 'y.gguf'} does not name its pre-tokenizer" in line and "convert the model again" in line
    assert found.tokenizer["pre_tokenizer"]["pretokenizers"] == [*PRE_TOKENIZERS["default"].steps]


@pytest.mark.parametrize(
    ("special", "ends"),
    [
        (["<|end|>", "<|call|>"], ["<|end|>", "<|call|>"]),
        (["<|end|>", "<|return|>", "<|call|>"], ["<|return|>", "<|call|>"]),
        (["<|end|>", "<|return|>", "<|calls|>"], ["<|return|>", "<|calls|>"]),
        (["<|end|>", "<|flush|>", "<|calls|>"], ["<|flush|>", "<|calls|>"]),
        (["<|end|>", "<|flush|>", "<|return|>"], ["<|end|>", "<|flush|>", "<|return|>"]),
        (["</s>", "<turn|>"], ["</s>", "<turn|>"]),
        (["</s>", "<|tool_response>"], ["<|tool_response>"]),
    ],
)
def test_ends_that_exclude_each_other(special, ends):
    metadata = byte_level(["a b"], "gpt-2", special)
    assert [metadata["tokenizer.ggml.tokens"][token] for token in eos_token_ids(gguf_of(metadata))] == ends


def test_a_normal_token_is_special_by_its_text_unless_merges_make_it():
    """Qwen 2's "</s>" is an ordinary token, though it ends an answer; gpt-oss's <|end|> ends none."""
    end, call = "<|end|>", ["<|return|>", "<|call|>"]
    for special, merges, added in (
        (["</s>"], ["a b"], {"</s>"}),
        ([], ["a b", "< /", "</ s", "</s >"], set()),
        ([end, *call], ["a b"], {end, *call}),
    ):
        metadata = byte_level(merges, "gpt-2", special)
        metadata["tokenizer.ggml.token_type"] = [1] * len(metadata["tokenizer.ggml.tokens"])
        assert {token["content"] for token in tokenizer_json(gguf_of(metadata))["added_tokens"]} == added
        assert eos_token_ids(gguf_of(metadata))


def test_a_user_defined_end_is_shown():
    """As Gemma 3's "</s>", which its tokenizer.json does not list as special."""
    metadata = byte_level(["a b"], "gpt-2", ["</s>"])
    metadata["tokenizer.ggml.token_type"][-1] = 4
    assert [token["special"] for token in tokenizer_json(gguf_of(metadata))["added_tokens"]] == [False]


def test_an_ordinary_token_is_no_default_end():
    """llama.cpp takes token 11 if a file names no end, though it is a comma in most vocabularies."""
    assert eos_token_ids(gguf_of(small(eos_token_id=None, bos_token_id=None))) == ()
    control = [1] * 11 + [3] + [1] * 5
    assert eos_token_ids(gguf_of(small(eos_token_id=None, token_type=control))) == (11,)
    spec = {"model": "llama", "pre": "default", "name": "x", "special": [], "roles": {}}
    assert eos_token_ids(gguf_of(header(spec))) == (2,)
    assert tokenizer_of(header(spec)).encode("ab").tokens == ["<s>", "▁ab"]


def test_a_comma_with_a_role_stays_text():
    """Files of models without BOS may name token 11."""
    tokenizer = tokenizer_of(small(bos_token_id=11, pre="default"))
    assert tokenizer.decode(tokenizer.encode("a,b").ids) == "a,b"


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({"general.name": "Phi-3-mini"}, [14, 0]),
        ({"general.name": "Phi 3 Mini"}, [14, 16, 15, 0]),
        ({"general.name": "MyPhi3", "pre": "qwen2"}, [14, 0]),
    ],
)
def test_phi3s_special_tokens_include_white_space(more, ids):
    assert tokenizer_of(small(**more)).encode("<|user|>\n a").ids == ids


@pytest.mark.parametrize(
    ("name", "pre", "mark", "sides"),
    [
        ("Phi-3", "gpt-2", "<s>", (False, False)),
        ("Phi-3", "gpt-2", "<|endoftext|>", (False, False)),
        ("Phi-3", "gpt-2", "<|end|>", (False, True)),
        ("x", "jina-v2-de", "<mask>", (True, False)),
        ("x", "jina-v2-de", "<s>", (False, False)),
        ("x", "gpt-2", "<mask>", (False, False)),
    ],
)
def test_sides_on_which_a_token_includes_white_space(name, pre, mark, sides):
    metadata = {**byte_level(["a b"], pre, [mark]), "general.name": name}
    (token,) = tokenizer_json(gguf_of(metadata))["added_tokens"]
    assert (token["lstrip"], token["rstrip"]) == sides


def test_phi3_is_recognised_by_its_architecture():
    """Newer files have the name "Phi 3"; Phi-4 has a byte-level vocabulary."""
    spec = {"model": "llama", "pre": "default", "name": "Phi 3", "special": [["<|user|>", 3]], "roles": {}}
    metadata = {**header(spec), "general.architecture": "phi3"}
    tokens = metadata["tokenizer.ggml.tokens"]
    expected = [tokens.index("<|user|>"), tokens.index("▁ab")]
    assert tokenizer_of(metadata).encode("<|user|>\n ab", add_special_tokens=False).ids == expected
    assert tokenizer_of(small(**{"general.architecture": "phi3"})).encode("<|user|>\na").ids == [14, 16, 0]


def test_ends_that_no_text_shows_are_exported(tmp_path):
    """Readers know some ends by their texts; two others are written as EOT and EOM."""
    special = ["</x>", "<|im_end|>", "<y>", "<z>"]
    metadata = byte_level(EXPECTED["merges"]["byte_level"], "qwen2", special)
    first = len(metadata["tokenizer.ggml.tokens"]) - len(special)
    checkpoint = open_checkpoint(write_llama(tmp_path / "x.gguf", metadata | {"tokenizer.ggml.eos_token_id": first}))
    assert checkpoint.eos_token_ids == (first, first + 1)
    checkpoint.eos_token_ids = tuple(range(first, first + 4))
    written = export_tokenizer(checkpoint, first + 4)
    assert {*eos_token_ids(gguf_of(written))} == {*checkpoint.eos_token_ids}
    checkpoint.eos_token_ids = (*checkpoint.eos_token_ids, 7)
    with pytest.raises(CheckpointError, match="it has keys for 2 of the end tokens"):
        export_tokenizer(checkpoint, first + 4)
