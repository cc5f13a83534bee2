"""llama.cpp's vocabularies give the token ids of its test vectors, which HF's tokenizers computed."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer

from castiron.pipelines.checkpoints.gguf_file import read_gguf
from castiron.pipelines.checkpoints.gguf_tokenizer import tokenizer_json
from tests.models.checkpoints import fetch

SEPARATOR = "\n__ggml_vocab_test__\n"
NAMES = """command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact
starcoder""".split()
# castiron reads BERT models from HF directories only.
UNSUPPORTED = ["bert-bge"]


def test_all_vocabularies_with_vectors_are_tested():
    found = {path.name.removeprefix("ggml-vocab-").removesuffix(".gguf.inp") for path in fetch("llama.cpp").glob("*.inp")}
    assert found == {*NAMES, *UNSUPPORTED}


@pytest.mark.parametrize("name", NAMES)
def test_a_vocabulary_gives_the_ids_of_its_vectors(name):
    path = fetch("llama.cpp") / f"ggml-vocab-{name}.gguf"
    read = lambda suffix: path.with_name(path.name + suffix).read_bytes().decode()
    texts = read(".inp").removesuffix(SEPARATOR).split(SEPARATOR)
    expected = [[int(token) for token in line.split()] for line in read(".out").removesuffix("\n").split("\n")]
    content = tokenizer_json(read_gguf(path))
    if name == "qwen35":
        # llama.cpp computed these vectors, and does not normalise to NFC as the model's tokenizer.json does.
        content["normalizer"] = None
    tokenizer = Tokenizer.from_str(json.dumps(content))
    assert len(texts) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids, text
