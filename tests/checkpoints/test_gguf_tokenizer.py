"""A GGUF file's tokenizer gives HF's tokens, on text of many kinds."""

from __future__ import annotations

import json

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, validate
from castiron.pipelines.checkpoints.gguf.export import export_tokenizer
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.checkpoints.pre_tokenizers import PRE_TOKENIZERS
from tests.support.tiny_gguf import write_gguf, write_llama

TEXTS = [
    "", " ", "  ", "\n", "\t\n \r\n", "Hello, world!", " leading", "trailing ", "   three   spaces   ",
    "don't I'LL we've y'all 'tis", "naïve café e\u0301cole ﬁn Å", "ÀÉÎÕÜ ß ẞ ı İ", "Здравствуй, мир!",
    "Γειά σου Κόσμε", "こんにちは世界。テスト", "你好，世界！繁體字", "안녕하세요 세계", "مرحبا بالعالم", "שלום עולם", "नमस्ते दुनिया",
    "สวัสดีชาวโลก", "வணக்கம் உலகம்", "ሰላም ዓለም", "Xin chào thế giới", "👋🏽🙂👩\u200d👩\u200d👧\u200d👦🏳️\u200d🌈 🇩🇪",
    "def f(x: int) -> str:\n    return f\"{x!r}\"  # comment\n\n\tif x:\n\t\tpass\n",
    "for (int i=0;i<n;++i){a[i]+=b[i];}", "SELECT * FROM t WHERE a >= 3.14e-10;", "<div class=\"a\">&nbsp;</div>",
    "C:\\path\\to\\file ~/.bashrc https://a.b/c?d=e#f", "\u200b\u00a0\u2028\ufeff\u0000\u0007",
    "\U0010ffff\U000e0001", "▁ ▁▁ Ġ Ċ", "a" * 500, "ab " * 200, "<0x0A> <0xFF> <unk> <s> </s>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|endoftext|>x<|endoftext|>",
    "<start_of_turn>user\nHi<end_of_turn>\n<bos><eos><unused7>[multimodal]", "x <|im_end|> y", "\n\n\n\n\t\t\t    \n",
]  # fmt: skip

# Where a run of spaces meets a digit, transformers splits a "smollm" GGUF differently from the model's tokenizer.json.
NUMBERS = ["1234567890", "3.14159", "year 2024, day 1", "1,000,000", "a1b2c3"]


def _pair(checkpoint: Checkpoint) -> tuple[Tokenizer, object]:
    """Return castiron's and transformers' tokenizer of a GGUF file."""
    peer = AutoTokenizer.from_pretrained(checkpoint.path.parent, gguf_file=checkpoint.path.name)
    return Tokenizer.from_str(json.dumps(checkpoint.tokenizer)), peer


@pytest.fixture(scope="module")
def smollm2_pair(smollm2):
    return _pair(smollm2)


@pytest.fixture(scope="module")
def gemma3_pair(gemma3):
    return _pair(gemma3)


def _without_digits_after_spaces(text: str) -> str:
    return "".join("n" if character.isnumeric() else character for character in text)


def assert_same_tokens(pair, text: str) -> None:
    ours, peer = pair
    ids = ours.encode(text).ids
    assert ids == peer.encode(text), text
    assert ours.decode(ids) == peer.decode(ids, skip_special_tokens=True), text
    assert ours.decode(ids, skip_special_tokens=False) == peer.decode(ids), text


def test_smollm2_equals_transformers(smollm2_pair):
    for text in [*map(_without_digits_after_spaces, TEXTS), *NUMBERS]:
        assert_same_tokens(smollm2_pair, text)


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80))
def test_smollm2_equals_transformers_on_any_text(text, smollm2_pair):
    assert_same_tokens(smollm2_pair, _without_digits_after_spaces(text))


def test_smollm2_splits_digits_first(smollm2_pair):
    """As when its merges were learned; transformers reads the GGUF without this rule."""
    ours, peer = smollm2_pair
    assert ours.encode("x =  12").tokens == ["x", "Ġ=", "ĠĠ", "1", "2"]
    assert peer.tokenize("x =  12") == ["x", "Ġ=", "Ġ", "Ġ", "1", "2"]


@pytest.mark.slow
def test_gemma3_equals_transformers(gemma3, gemma3_pair):
    """The merges too, in their order: a merge in a wrong position shows in rare text only."""
    for text in TEXTS + NUMBERS:
        assert_same_tokens(gemma3_pair, text)
    peer = json.loads(gemma3_pair[1].backend_tokenizer.to_str())
    assert gemma3.tokenizer["model"]["vocab"] == peer["model"]["vocab"]
    assert [list(merge) for merge in gemma3.tokenizer["model"]["merges"]] == peer["model"]["merges"]
    assert gemma3.tokenizer["added_tokens"] == peer["added_tokens"]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80))
def test_gemma3_equals_transformers_on_any_text(text, gemma3_pair):
    assert_same_tokens(gemma3_pair, text)


def _bpe_metadata(**more) -> dict:
    tokens = ["a", "b", "1", "2", "Ġ", "ab", "Ġa", "12", "Ġab", "<s>", "</s>", "<u>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 9 + [3, 3, 4],
        "tokenizer.ggml.merges": ["a b", "Ġ a", "1 2", "Ġ ab"],
        "tokenizer.ggml.bos_token_id": 9,
        "tokenizer.ggml.eos_token_id": 10,
    } | {f"tokenizer.ggml.{key}": value for key, value in more.items()}


def _tokenizer(path, metadata: dict) -> Tokenizer:
    return Tokenizer.from_str(json.dumps(open_checkpoint(write_llama(path, metadata)).tokenizer))


@pytest.mark.parametrize(
    ("more", "text", "tokens"),
    [
        ({}, "ab ab12", ["ab", "Ġab", "12"]),
        ({"pre": "smollm"}, "ab ab12", ["ab", "Ġab", "1", "2"]),
        ({"pre": "qwen2"}, "ab ab12", ["ab", "Ġab", "1", "2"]),
        ({"pre": "llama-bpe"}, "ab ab12", ["<s>", "ab", "Ġab", "12"]),
        ({"pre": "deepseek-llm"}, "ab ab12", ["ab", "Ġab", "1", "2"]),
        ({"pre": "deepseek-coder"}, "ab ab12", ["ab", "Ġab", "1", "2"]),
        ({"pre": "deepseek-v3"}, "ab ab12", ["ab", "Ġab", "12"]),
        # A mark of punctuation is one word with the letters after it.
        ({"pre": "deepseek-v3", "tokens": ["<s>", "a", ".", ".a"], "merges": [". a"], "token_type": [1] * 4,
          "bos_token_id": 0, "eos_token_id": 0}, "a.a", ["a", ".a"]),
        ({"pre": "glm4"}, "ab ab12", ["ab", "Ġab", "12"]),
        ({"pre": "falcon"}, "ab ab12", ["ab", "Ġab", "12"]),
        # Falcon's splits a run of digits after each third.
        ({"pre": "falcon", "tokens": ["<s>", "1", "2", "12", "21"], "merges": ["2 1", "1 2"], "token_type": [1] * 5,
          "bos_token_id": 0, "eos_token_id": 0}, "121212", ["1", "21", "21", "2"]),
        ({"add_bos_token": True, "add_eos_token": True}, "ab ab12", ["<s>", "ab", "Ġab", "12", "</s>"]),
        # Llama 3's tokenizer takes a word of the vocabulary that no merges make.
        ({"merges": ["1 2"]}, " ab", ["Ġ", "a", "b"]),
        ({"merges": ["1 2"], "pre": "llama-bpe", "add_bos_token": False}, " ab", ["Ġab"]),
        # Qwen 2's normalises to NFC, here to two bytes.
        ({"pre": "qwen2", "tokens": ["Ã", "ħ", "Ãħ"], "merges": ["Ã ħ"], "token_type": [1] * 3, "bos_token_id": 0,
          "eos_token_id": 0}, "A\u030a", ["Ãħ"]),
    ],
)  # fmt: skip
def test_pre_tokenizers_split_and_special_tokens_are_added(more, text, tokens, tmp_path):
    assert _tokenizer(tmp_path / "x.gguf", _bpe_metadata(**more)).encode(text).tokens == tokens


def test_fim_tokens_are_those_that_the_file_names(tmp_path):
    ids = {"fim_pre_token_id": 11, "prefix_token_id": 3, "suffix_token_id": 5, "middle_token_id": 6, "fim_sep_token_id": 7}
    found = open_checkpoint(write_llama(tmp_path / "x.gguf", _bpe_metadata(**ids)))
    assert found.fim_token_ids == {"pre": 11, "suf": 5, "mid": 6, "sep": 7}
    with pytest.raises(CheckpointError, match="fim_pad_token_id is 10000, outside the vocabulary"):
        validate(open_checkpoint(write_llama(tmp_path / "y.gguf", _bpe_metadata(fim_pad_token_id=10000))), 12)


def test_control_tokens_are_special_and_user_tokens_are_not_split(tmp_path):
    tokenizer = _tokenizer(tmp_path / "x.gguf", _bpe_metadata())
    ids = tokenizer.encode("a<s>b<u>").ids
    assert ids == [0, 9, 1, 11]
    assert tokenizer.decode(ids) == "ab<u>"


def test_every_row_of_pre_tokenizers_loads(tmp_path):
    for name in PRE_TOKENIZERS:
        assert _tokenizer(tmp_path / "x.gguf", _bpe_metadata(pre=name)).encode("ab 12\n It's  ok").ids


def test_expressions_are_those_of_transformers():
    """For every name that both know; transformers has none for those that it reads as GPT-2's."""
    both = PRE_TOKENIZERS.keys() & GGUF_PRE_TOKENIZER_SPLITS.keys()
    assert len(both) > 8
    for name in both:
        regexes = [step["pattern"]["Regex"] for step in PRE_TOKENIZERS[name].steps if step["type"] == "Split"]
        assert regexes == [GGUF_PRE_TOKENIZER_SPLITS[name]], name


REFUSED = {
    "unknown pre": ({"pre": "bert-bge"}, "unknown pre-tokenizer 'bert-bge'; known are gpt-2"),
    "unknown kind": ({"model": "rwkv"}, "tokenizer.ggml.model is 'rwkv'"),
    "no merges": ({"merges": "none"}, "tokenizer.ggml.merges is not a list of strings"),
    "merge of unknown tokens": ({"merges": ["a q"]}, "the merge 'a q' uses or makes an unknown token"),
    "merge to an unknown token": ({"merges": ["b a"]}, "the merge 'b a' uses or makes an unknown token"),
    "tokens that are numbers": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is not a list of strings"),
    "too few types": ({"token_type": [1, 1]}, "not a list of 12 numbers"),
    "flag that is a number": ({"add_bos_token": 1}, "not true or false"),
    "bos past the vocabulary": ({"add_bos_token": True, "bos_token_id": 99}, "is 99, not below 12"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_metadata_ends_in_one_line(name, tmp_path):
    more, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message) as error:
        open_checkpoint(write_llama(tmp_path / "x.gguf", _bpe_metadata(**more)))
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a SentencePiece BPE model like Llama 2's, castiron's tokenizer of it, and its metadata."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = [line for text in TEXTS for line in text.splitlines() if line.strip() and "\0" not in line]
    (folder / "corpus.txt").write_text("\n".join(lines), encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "corpus.txt"), model_prefix=str(folder / "m"), vocab_size=700, model_type="bpe",
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=True, character_coverage=0.99, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "m.model"))
    size = model.vocab_size()

    def kind(token: int) -> int:
        return 2 if model.is_unknown(token) else 3 if model.is_control(token) else 6 if model.is_byte(token) else 1

    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(token) for token in range(size)],
        "tokenizer.ggml.scores": [float(model.get_score(token)) for token in range(size)],
        "tokenizer.ggml.token_type": [kind(token) for token in range(size)],
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
    }
    return model, _tokenizer(folder / "x.gguf", metadata), metadata


def _plain(text: str) -> bool:
    """Whether a text contains no special token, which SentencePiece would read as plain text."""
    return not any(special in text for special in ("<unk>", "<s>", "</s>", "<0x"))


@settings(max_examples=300, deadline=None)
@given(text=(st.sampled_from(TEXTS[1:]) | st.text(min_size=1, max_size=60)).filter(_plain))
def test_sentencepiece_equals_the_library_on_any_text(text, trained):
    model, tokenizer, _ = trained
    ids = tokenizer.encode(text).ids
    assert ids == [model.bos_id(), *model.encode(text)]
    assert tokenizer.decode(ids) == text.replace("▁", " ")


def test_sentencepiece_is_exported_as_llama_cpp_does(trained, tmp_path):
    """tokenizer.json has merges instead of scores; their order and all tokens stay the same."""
    model, tokenizer, metadata = trained
    config = {"model_type": "llama", "pad_token_id": None}
    content = json.loads(tokenizer.to_str())
    checkpoint = Checkpoint(tmp_path, "hf", config, {}, content, bos_token_id=model.bos_id(), eos_token_ids=(model.eos_id(),))
    written = export_tokenizer(checkpoint, model.vocab_size())
    assert all(written[key] == value for key, value in metadata.items() if not key.endswith("scores"))
    assert written["tokenizer.ggml.add_bos_token"] and written["tokenizer.ggml.add_space_prefix"]
    # Single characters and bytes are made by no merge.
    key, complete = "tokenizer.ggml.scores", [len(token) > 1 and token[0] != "<" for token in metadata["tokenizer.ggml.tokens"]]
    by_score = lambda of: sorted((i for i, made in enumerate(complete) if made), key=lambda i: -of[key][i])
    assert by_score(written) == by_score(metadata)
    back = _tokenizer(tmp_path / "x.gguf", written)
    for text in filter(_plain, TEXTS[1:]):
        assert back.encode(text).ids == [model.bos_id(), *model.encode(text)], text
    # Gemma's tokenizer adds no space before a text, and user-defined tokens have plain spaces.
    content["normalizer"] = content["normalizer"]["normalizers"][1]
    content["added_tokens"].append({**content["added_tokens"][0], "id": 700, "content": "q▁q", "special": False})
    written = export_tokenizer(checkpoint, model.vocab_size() + 1)
    assert not written["tokenizer.ggml.add_space_prefix"] and written["tokenizer.ggml.tokens"][700] == "q q"


@pytest.fixture(scope="module")
def gemma4(tmp_path_factory):
    """A checkpoint with a tokenizer like Gemma 4's, and transformers' tokenizer of it."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<|tool_response>", "<turn|>"]
    merges = ["▁ t", "h e", "▁t he", "▁ ▁", "▁▁ ▁▁", "\n \n", "l l", "e ll", "o ,"]
    joined = [merge.replace(" ", "") for merge in merges]
    tokens = [*special, "<|tool_call>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁\nthelowrd,!", *joined]
    roles = {"padding": 0, "eos": 1, "bos": 2, "unknown": 3}
    metadata = {
        "model": "gemma4", "tokens": tokens, "merges": merges, "scores": [-1000.0] * len(tokens),
        "token_type": [3] * len(special) + [4] + [6] * 256 + [1] * (len(tokens) - len(special) - 257),
        "add_bos_token": True, "add_space_prefix": False, **{f"{role}_token_id": number for role, number in roles.items()},
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    path = tmp_path_factory.mktemp("gemma4") / "x.gguf"
    peer = write_gguf(path.with_name("peer.gguf"), "gemma4", metadata | {"gemma4.block_count": 1}, {})
    checkpoint = open_checkpoint(write_llama(path, metadata))
    return checkpoint, AutoTokenizer.from_pretrained(peer.parent, gguf_file=peer.name)


def test_gemma4_equals_transformers(gemma4):
    """The chat template writes BOS, and tokens that the file calls user-defined are special."""
    checkpoint, peer = gemma4
    ours = Tokenizer.from_str(json.dumps(checkpoint.tokenizer))
    for text in [*TEXTS, "hello,\n\n\n\n     the    world!<turn|>the<|tool_call>the<eos>"]:
        ids = ours.encode(text).ids
        assert ids == peer.encode(text), text
        assert ours.decode(ids, skip_special_tokens=False) == peer.decode(ids), text
    assert ours.decode(ours.encode("the<|tool_call>world").ids) == "theworld"


def test_gemma4_ends_an_answer_at_each_of_its_ends(gemma4):
    assert gemma4[0].eos_token_ids == (1, 4, 5)
