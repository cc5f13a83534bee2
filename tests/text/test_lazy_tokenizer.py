"""A tokenizer that loads a part of its vocabulary gives the ids and the text of the complete one."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from castiron.pipelines import evaluate
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text import lazy_tokenizer
from castiron.pipelines.text.lazy_tokenizer import LazyTokenizer
from castiron.pipelines.text.tokenizer import Detokeniser, Tokenizer, load_tokenizer
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle
from castiron.vmfb.bundle.manifest import TABLE, TEMPLATE, TOKENIZER, BundleError, Tokens
from castiron.vmfb.bundle.token_table import TokenTable, table_of
from tests.support import served
from tests.vmfb import hostile_bundles, toy

TRAINING = [
    *(Path(evaluate.__file__).parent / "evaluate_text.txt").read_text(encoding="utf-8")[:20_000].splitlines(),
    *["the cat sat on the mat", "naïve Ångström 你好 你们好 🚀🚀", "aaaa  bb\n\n\n    x"] * 9,
]
WORDS = [
    "the",
    " the",
    "they",
    "thought",
    "你好",
    "🚀",
    "e\u0301",
    "ﬁ",
    "Ｔｈｅ",
    "aaaaaaaa",
    "    ",
    "\n\n",
    "the" * 20,
    "▁",
    "Ġthe",
]
WORDS += sorted({*TRAINING[4].split(" ")})
WORDS += ["<|end|>", "<|e", "nd|>", "<s>", "<unk>", "<0xE4>", "<think>", "＜think＞", "☃", "WORD", "sword WORDy", "é", "\t"]
ADDED = [
    AddedToken("<think>", special=False, normalized=False), AddedToken("<|end|>", special=True),
    AddedToken("WORD", single_word=True), AddedToken("☃", single_word=True, normalized=False),
    AddedToken("[pad]", lstrip=True, rstrip=True), AddedToken("é", normalized=True, single_word=True),
]  # fmt: skip


def trained(normalizer=None, pre_tokenizer=None, decoder=None, alphabet=(), special=(), **settings) -> tokenizers.Tokenizer:
    """Return a BPE tokenizer with merges of `TRAINING` and the tokens `ADDED`, most of them not in its vocabulary."""
    made = tokenizers.Tokenizer(models.BPE(**settings))
    made.normalizer, made.decoder = normalizer, decoder
    # Without words, training would make tokens of complete lines.
    made.pre_tokenizer = pre_tokenizer or pre_tokenizers.Split(Regex("[ ▁]"), "merged_with_next")
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, special_tokens=list(special), initial_alphabet=list(alphabet), min_frequency=1
    )
    made.train_from_iterator(TRAINING, trainer)
    changed = json.loads(made.to_str())
    changed["model"] |= settings
    if pre_tokenizer is None:
        changed["pre_tokenizer"] = None
    made = tokenizers.Tokenizer.from_str(json.dumps(changed))
    made.add_tokens(ADDED)
    made.post_processor = processors.TemplateProcessing("<|end|> $A", special_tokens=[("<|end|>", made.token_to_id("<|end|>"))])
    return made


def byte_level(**settings) -> tokenizers.Tokenizer:
    split = pre_tokenizers.Split(Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"), "isolated")
    steps = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(settings.pop("normalizer", None), steps, decoders.ByteLevel(), alphabet, **settings)


def sentencepiece(normalizer=None, pre_tokenizer=None, **settings) -> tokenizers.Tokenizer:
    bytes_ = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fallback = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True} | settings
    return trained(normalizer, pre_tokenizer, decoder, map(chr, range(0x21, 0x7F)), bytes_, **fallback)


def with_model(made: tokenizers.Tokenizer, tokens: list[str], merges: list[list[str]]) -> tokenizers.Tokenizer:
    """Return a copy of `made`, without added tokens, in which the vocabulary has more tokens and merges."""
    changed = json.loads(made.to_str()) | {"added_tokens": [], "post_processor": None}
    vocab = changed["model"]["vocab"]
    for token in tokens:
        vocab.setdefault(token, len(vocab))
    changed["model"]["merges"] += merges
    return tokenizers.Tokenizer.from_str(json.dumps(changed))


LLAMA2 = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
KINDS = {
    "gpt-2": byte_level,
    "qwen": lambda: byte_level(normalizer=normalizers.NFC()),
    "nfkc": lambda: byte_level(normalizer=normalizers.NFKC(), ignore_merges=True),
    # No merges make these tokens.
    "llama-3": lambda: with_model(byte_level(ignore_merges=True), ["aaaaaaaa", "thethe", "ĠWORD"], []),
    "words of unknown characters": lambda: with_model(
        trained(unk_token="<unk>", special=["<unk>"], pre_tokenizer=pre_tokenizers.Whitespace(), ignore_merges=True),
        ["ßßß", "Ж"], [],
    ),
    "llama-2": lambda: sentencepiece(LLAMA2),
    "gemma": lambda: sentencepiece(normalizers.Replace(" ", "▁")),
    "metaspace": lambda: sentencepiece(None, pre_tokenizers.Metaspace(prepend_scheme="first")),
    "unknown characters are left out": lambda: trained(decoder=decoders.Fuse()),
    "unknown characters": lambda: sentencepiece(byte_fallback=False, fuse_unk=False),
    "merges of bytes": lambda: with_model(
        sentencepiece(), ["<0xC3><0x9F>", "<unk>t", "<0xC3><0x9F><0xC3><0x9F>"],
        [["<0xC3>", "<0x9F>"], ["<0xC3><0x9F>", "<0xC3><0x9F>"]],
    ),
    "no decoder": lambda: trained(pre_tokenizer=pre_tokenizers.Whitespace()),
}  # fmt: skip


def never() -> tokenizers.Tokenizer:
    raise AssertionError("the complete tokenizer was loaded")


@functools.cache
def both(kind: str) -> tuple[tokenizers.Tokenizer, LazyTokenizer]:
    content = KINDS[kind]().to_str()
    table = table_of(json.loads(content))
    assert table is not None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / TABLE
        path.write_bytes(table)
        return tokenizers.Tokenizer.from_str(content), LazyTokenizer(Part.of(path), never)


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=4)), max_size=12).map("".join), st.booleans())
@example("the theweather WORD sword ßßß☃ Ж ßßß aaaaaaaa thethe [pad] the", True)
@example("ＷＯＲＤ ＜think＞ e\u0301 xé é☃ a☃b \ue000", False)
def test_a_text_has_the_ids_of_the_complete_vocabulary(kind, text, special):
    complete, lazy = both(kind)
    lazy._texts = 0
    expected, found = (each.encode(text, add_special_tokens=special) for each in (complete, lazy))
    assert (found.ids, found.tokens, found.offsets) == (expected.ids, expected.tokens, expected.offsets)
    assert lazy.decode(found.ids, skip_special_tokens=False) == complete.decode(found.ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.integers(0, 1000), max_size=12))
def test_ids_have_the_text_of_the_complete_vocabulary(kind, ids):
    complete, lazy = both(kind)
    assert list(map(lazy.id_to_token, range(1001))) == list(map(complete.id_to_token, range(1001)))
    assert lazy.decode(ids, skip_special_tokens=False) == complete.decode(ids, skip_special_tokens=False)
    streams = [Detokeniser(Tokenizer(each, vocab=1000)) for each in (complete, lazy)]
    expected, found = ([*map(stream.add, ids), stream.finish()] for stream in streams)
    assert found == expected


def test_truncation_and_the_vocabulary_are_those_of_the_complete_tokenizer(tmp_path):
    content = KINDS["qwen"]().to_str()
    (tmp_path / TABLE).write_bytes(table_of(json.loads(content)))
    loaded = []
    lazy = LazyTokenizer(Part.of(tmp_path / TABLE), lambda: loaded.append(1) or tokenizers.Tokenizer.from_str(content))
    text = Tokenizer(lazy, vocab=1000)
    ids = text.encode("the cat sat")
    assert len(ids) > 2 and not loaded
    lazy.enable_truncation(2)
    assert text.encode("the cat sat") == ids[:2] and loaded == [1]
    assert lazy.get_vocab() == tokenizers.Tokenizer.from_str(content).get_vocab() and loaded == [1]


def test_the_complete_tokenizer_is_loaded_after_the_maximum_number_of_texts(tmp_path):
    content = KINDS["gemma"]().to_str()
    (tmp_path / TABLE).write_bytes(table_of(json.loads(content)))
    loaded = []
    lazy = LazyTokenizer(Part.of(tmp_path / TABLE), lambda: loaded.append(1) or tokenizers.Tokenizer.from_str(content))
    ids = [lazy.encode("the cat").ids for _ in range(lazy_tokenizer.MAX_TEXTS)]
    assert not loaded
    ids += [lazy.encode("the cat").ids for _ in range(3)]
    assert loaded == [1] and all(each == ids[0] for each in ids)


@pytest.mark.parametrize(
    "change",
    [
        {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0},
        {"dropout": 0.5},
        {"continuing_subword_prefix": "##"},
        {"end_of_word_suffix": "</w>"},
        {"vocab": {"a": 0, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
        {"merges": ["#version: 0.2"]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_kinds_of_tokenizers_have_no_table(change):
    content = json.loads(with_model(byte_level(), [], []).to_str())
    assert table_of(content)
    content["model"] |= change
    assert table_of(content) is None


def test_added_tokens_whose_ids_the_library_changes_have_no_table():
    content = json.loads(byte_level().to_str())
    assert table_of(content)
    content["added_tokens"][-1]["id"] += 1
    assert table_of(content) is None


def write(folder: Path) -> Path:
    """Write a toy bundle with the tokenizer `small` and its table."""
    files = {TOKENIZER: small(), TABLE: table_of(json.loads(small())), TEMPLATE: "{{ messages[0].content }}"}
    return toy.write(folder, files=files, tokens=Tokens(None, (SMALL["</s>"],))).path


SMALL = {"a": 0, "b": 1, "ab": 2, "c": 3, "</s>": 4, "abc": 5}


def small() -> str:
    made = tokenizers.Tokenizer(models.BPE(vocab=SMALL, merges=[("a", "b"), ("ab", "c")]))
    made.decoder = decoders.Fuse()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made.to_str()


def test_run_loads_no_complete_tokenizer_for_a_question(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "toy")
    pack_bundle(open_bundle(path), tmp_path / "toy.castiron")
    expected = load_tokenizer(path).encode_chat([{"role": "user", "content": "abcab"}])
    assert expected == [5, 2]
    monkeypatch.setattr("castiron.pipelines.text.tokenizer._read_tokenizer", lambda file: never())
    for bundle in (path, tmp_path / "toy.castiron"):
        assert load_tokenizer(bundle, lazy=True).encode_chat([{"role": "user", "content": "abcab"}]) == expected
        assert cli.main(["run", str(bundle), "abcab", "-n", "3", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["prompt_tokens"] == 2


def test_a_bundle_without_a_table_loads_the_complete_tokenizer(tmp_path):
    path = write(tmp_path / "toy")
    (path / TABLE).unlink()
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["files"][TABLE]
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert isinstance(load_tokenizer(path, lazy=True).backend, tokenizers.Tokenizer)
    assert load_tokenizer(path, lazy=True).encode("abcab") == [5, 2]


def test_a_compiled_bundle_has_a_table(tmp_path):
    checkpoint = served.checkpoint(tmp_path / "checkpoint")
    content = json.loads((checkpoint / "tokenizer.json").read_text())
    content["model"] = {"type": "BPE", "unk_token": "<unk>", "vocab": content["model"]["vocab"], "merges": []}
    (checkpoint / "tokenizer.json").write_text(json.dumps(content))
    path = compile_model(checkpoint, tmp_path / "bundle", Options(context=served.CONTEXT, batch=(served.SLOTS,))).bundle
    assert isinstance(load_tokenizer(path, lazy=True).backend, LazyTokenizer)
    assert load_tokenizer(path, lazy=True).encode("Hello ☃") == load_tokenizer(path).encode("Hello ☃")


def counts(data: bytes) -> np.ndarray:
    return np.frombuffer(data[:20], "<i4").copy()


def damaged(data: bytes, at: int, value: int) -> bytes:
    """Return a copy of the table with another number of four bytes."""
    numbers = np.frombuffer(data[: len(data) // 4 * 4], "<i4").copy()
    numbers[at] = value
    return numbers.tobytes() + data[len(numbers) * 4 :]


@pytest.mark.parametrize("value", [-1, 10**6, 2**31 - 1, -(2**31)])
def test_numbers_out_of_range_are_one_line(tmp_path, value):
    data = table_of(json.loads(small()))
    tokens, merges, symbols, *_ = counts(data)
    for at in range(5 + tokens + 1 + 3 * merges + symbols):
        (tmp_path / TABLE).write_bytes(damaged(data, at, value))
        with pytest.raises(BundleError, match="damaged file in bundle: .*tokenizer.table; compile the bundle again"):
            TokenTable(Part.of(tmp_path / TABLE))


def test_a_damaged_table_with_a_valid_hash_is_one_line(tmp_path, capsys):
    path = write(tmp_path / "toy")
    data = (path / TABLE).read_bytes()
    text = data.index(b"abab")
    broken = {
        "empty": b"",
        "short": data[:10],
        "cut off": data[:-1],
        "longer": data + b"\0",
        "not UTF-8": data[:text] + b"\xff" + data[text + 1 :],
        "a character in two tokens": data[:text] + "é".encode() + data[text + 2 :],
        "another model": data.replace(b'"BPE"', b'"XPE"'),
        "a merge without a token": data[: 4 * 12] + np.array([0, 3, 2], "<i4").tobytes() + data[4 * 15 :],
    }
    for name, content in broken.items():
        (path / TABLE).write_bytes(content)
        hostile_bundles.rehash(path)
        assert cli.main(["run", str(path), "abc", "-n", "1"]) == 1, name
        message = capsys.readouterr().err
        assert message.count("\n") == 1 and "damaged file in bundle" in message, name
    (path / TABLE).write_bytes(data)
    hostile_bundles.rehash(path)
    assert cli.main(["run", str(path), "abc", "-n", "1"]) == 0
    (path / TABLE).write_bytes(data[::-1])
    assert cli.main(["run", str(path), "abc", "-n", "1"]) == 1 and "sha256 differs" in capsys.readouterr().err


def test_random_damage_of_a_table_raises_no_other_error(tmp_path):
    data, path = table_of(json.loads(small())), tmp_path / TABLE
    rejected, head = 0, data.index(b'{"')
    for seed in range(300):
        path.write_bytes(hostile_bundles.damage(random.Random(seed), data, head))
        try:
            lazy = LazyTokenizer(Part.of(path), never)
            lazy.decode([*lazy.encode("abcab abc").ids, *range(99)], skip_special_tokens=False)
        except BundleError:
            rejected += 1
    assert 100 < rejected < 300


def test_a_damaged_tokenizer_is_one_line_when_it_is_needed(tmp_path):
    path = write(tmp_path / "toy")
    (path / TOKENIZER).write_bytes(b"{}")
    hostile_bundles.rehash(path)
    text = load_tokenizer(path, lazy=True)
    assert text.encode("abc") == [5]
    with pytest.raises(PipelineError, match=r"cannot read .*tokenizer.json .*; compile the bundle again"):
        _ = text.longest_token
