"""llama.cpp's vocabularies give the token ids of its test vectors, which HF's tokenizers computed.

A part of a vocabulary gives the same ids as all of it.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from castiron.pipelines.checkpoints.gguf_file import read_gguf
from castiron.pipelines.checkpoints.gguf_tokenizer import tokenizer_json
from castiron.pipelines.text.lazy_tokenizer import LazyTokenizer
from castiron.vmfb.archive import Part
from castiron.vmfb.token_table import table_of
from tests.models.checkpoints import fetch

SEPARATOR = "\n__ggml_vocab_test__\n"
NAMES = """command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact
starcoder""".split()
# castiron reads BERT models from HF directories only.
UNSUPPORTED = ["bert-bge"]


def texts_of(name: str) -> list[str]:
    path = fetch("llama.cpp") / f"ggml-vocab-{name}.gguf.inp"
    return path.read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)


def test_all_vocabularies_with_vectors_are_tested():
    found = {path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp") for path in fetch("llama.cpp").glob("*.inp")}
    assert found == {*NAMES, *UNSUPPORTED}


@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_gives_the_ids_of_its_vectors(name):
    path = fetch("llama.cpp") / f"ggml-vocab-{name}.gguf"
    texts = texts_of(name)
    lines = path.with_name(path.name + ".out").read_text(encoding="utf-8").removesuffix("\n").split("\n")
    expected = [[int(token) for token in line.split()] for line in lines]
    content = tokenizer_json(read_gguf(path))
    if name == "qwen35":
        # llama.cpp computed these vectors, and does not normalise to NFC as the model's tokenizer.json does.
        content["normalizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    assert len(texts) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text


def never() -> Tokenizer:
    raise AssertionError("the complete tokenizer was loaded")


def check_part(content: dict, folder: Path, name: str) -> None:
    """Compare the tokens of many texts with those of the complete vocabulary."""
    table, random_ = table_of(content), random.Random(name)
    assert table
    (folder / "tokenizer.table").write_bytes(table)
    complete, lazy = Tokenizer.from_str(json.dumps(content)), LazyTokenizer(Part.of(folder / "tokenizer.table"), never)
    tokens = [*complete.get_vocab()]
    texts = [text for each in ("gpt-2", "qwen35", "gemma-4") for text in texts_of(each)]
    texts += ["".join(random_.choices(tokens, k=20)).replace(*pair) for pair in (("Ġ", " "), ("▁", " "), ("", "")) * 10]
    added = [token["content"] for token in content["added_tokens"]]
    texts += ["".join(random_.choices([*added, *text.split()], k=9)) for text in texts if added or text.split()]
    for text in texts:
        lazy._texts = 0
        expected, found = complete.encode(text), lazy.encode(text)
        assert (found.ids, found.tokens, found.offsets) == (expected.ids, expected.tokens, expected.offsets), text
        ids = [*found.ids, *random_.choices(range(len(tokens) + 9), k=9)]
        assert lazy.decode(ids, skip_special_tokens=False) == complete.decode(ids, skip_special_tokens=False), ids


@pytest.mark.parametrize("name", NAMES)
def test_a_part_of_a_vocabulary_gives_the_ids_of_all_of_it(name, tmp_path):
    check_part(tokenizer_json(read_gguf(fetch("llama.cpp") / f"ggml-vocab-{name}.gguf")), tmp_path, name)


def test_a_part_of_gemmas_vocabulary_gives_the_ids_of_all_of_it(gemma3, tmp_path):
    check_part(gemma3.tokenizer, tmp_path, "gemma-3-270m")
