"""llama.cpp's vocabularies give the token ids of its test vectors, which HF's tokenizers computed.

A part of a vocabulary gives the same ids as all of it.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from castiron.pipelines.checkpoints.gguf.gguf_file import GgufFile, read_gguf
from castiron.pipelines.checkpoints.gguf.tokenizer_json import tokenizer_json
from castiron.pipelines.checkpoints.gguf.vocabulary import eos_token_ids
from castiron.pipelines.text.lazy_tokenizer import LazyTokenizer
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.token_table import table_of
from tests.models.checkpoints import fetch
from tests.support.llama_cpp_texts import is_comparable, texts

SEPARATOR = "\n__ggml_vocab_test__\n"
NAMES = """command-r deepseek-coder deepseek-llm falcon gemma-4 gpt-2 llama-bpe llama-spm mpt phi-3 qwen2 qwen35 refact
starcoder""".split()
# Vocabularies without test vectors.
OTHERS = ["aquila", "baichuan", "gpt-neox"]
# castiron reads BERT models from HF directories only.
UNSUPPORTED = ["bert-bge", "nomic-bert-moe"]
# What llama.cpp gave: `python -m tests.models.llama_cpp_vocabularies record` writes it.
IDS = Path(__file__).with_name("llama_cpp_ids.json")


def texts_of(name: str) -> list[str]:
    path = fetch("llama.cpp") / f"ggml-vocab-{name}.gguf.inp"
    return path.read_bytes().decode().removesuffix(SEPARATOR).split(SEPARATOR)


def vocabularies() -> dict[str, Path]:
    return {name: fetch("llama.cpp") / f"ggml-vocab-{name}.gguf" for name in [*NAMES, *OTHERS]}


def texts_for(name: str, file: GgufFile, count: int = 200) -> list[str]:
    """Random texts with some of the special tokens of a vocabulary."""
    random_, added = random.Random(name), [token["content"] for token in tokenizer_json(file)["added_tokens"]]
    return texts(random_, count, random_.sample(added, min(20, len(added))))


def digests_of(file: GgufFile, texts: list[str], encode: Callable[[str], list[int]]) -> list[str | None]:
    """A digest of each text's ids; None if llama.cpp differs from the model's tokenizer.json on purpose."""
    keys = [file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre")]
    pre = (keys[1] or "default") if keys[0] == "gpt2" else None
    digest = lambda text: hashlib.sha256(json.dumps(encode(text)).encode()).hexdigest()[:6]
    return [digest(text) if is_comparable(pre, text) else None for text in texts]


def test_all_vocabularies_are_tested():
    found = {path.stem.removeprefix("ggml-vocab-") for path in fetch("llama.cpp").glob("*.gguf")}
    assert found == {*NAMES, *OTHERS, *UNSUPPORTED}


@pytest.mark.parametrize("name", [*NAMES, *OTHERS])
def test_ids_and_ends_are_llama_cpps(name):
    """On random texts with special tokens; the digests are of llama.cpp's ids."""
    recorded, file = json.loads(IDS.read_text(encoding="utf-8"))[name], read_gguf(vocabularies()[name])
    tokenizer = Tokenizer.from_str(json.dumps(tokenizer_json(file)))
    encode = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    samples = texts_for(name, file)
    for text, found, expected in zip(samples, digests_of(file, samples, encode), recorded["ids"], strict=True):
        assert found == expected, text
    assert sorted(eos_token_ids(file)) == recorded["ends"]


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
