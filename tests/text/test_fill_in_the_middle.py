"""Prompts for fill-in-the-middle by model family, and the ends of their answers."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.fill_in_the_middle import FAMILIES, LineStops, fim_of
from castiron.pipelines.text.tokenizer import Tokenizer

LETTERS = ["?", *map(chr, range(0x20, 0x7F)), "\n", "\u2581", "\u263a"]


def tokenizer(*special: str, bos: str = "", sentencepiece: bool = False, is_special: bool = True) -> Tokenizer:
    """Return a tokenizer of characters and the `special` tokens; `bos` is put before a text."""
    names = [*LETTERS, *special, *([bos] if bos else [])]
    found = tokenizers.Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, [], unk_token="?"))
    if sentencepiece:
        found.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    found.add_tokens([AddedToken(name, special=is_special, normalized=False) for name in special])
    if bos:
        found.add_special_tokens([AddedToken(bos, special=True, normalized=False)])
        found.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, found.token_to_id(bos))])
    return Tokenizer(found, bos=found.token_to_id(bos) if bos else None)


def prompt(text: Tokenizer, *arguments, **options) -> str:
    return "|".join(text.backend.id_to_token(n) for n in fim_of(text).prompt(*arguments, **options))


@pytest.mark.parametrize("names", FAMILIES[:-1], ids=lambda names: names[0])
def test_families_write_prefix_suffix_middle(names):
    before, after, middle = names
    assert prompt(tokenizer(*names), "ab", "c") == f"{before}|a|b|{after}|c|{middle}"
    assert prompt(tokenizer(*names, bos="<s>"), "a", "") == f"<s>|{before}|a|{after}|{middle}"


def test_mistral_writes_the_suffix_first_and_no_middle():
    assert prompt(tokenizer("[PREFIX]", "[SUFFIX]", "[MIDDLE]", bos="<s>"), "a", "b") == "<s>|[SUFFIX]|b|[PREFIX]|a"


def test_only_a_prefix_has_sentencepieces_space():
    text = tokenizer("▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>", bos="<s>", sentencepiece=True)
    assert prompt(text, "a b", "c") == "<s>|▁<PRE>|▁|a|▁|b|▁<SUF>|c|▁<MID>"
    assert {text.backend.id_to_token(n) for n in fim_of(text).ends} == {"▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"}


def test_a_checkpoint_may_name_the_tokens():
    text = tokenizer("<A>", "<B>", "<C>", "<|endoftext|>")
    text.fim = {"pre": 100, "suf": 101, "mid": 102, "pad": 999}
    assert prompt(text, "a<A>", "b").startswith("<B>|a|<|A|>|<C>|b|<|endoftext|>")
    assert len(fim_of(text).ends) == 3


def test_other_files_come_first():
    files = [("f", "x"), ("g", "y")]
    qwen = tokenizer(*FAMILIES[0], "<|repo_name|>", "<|file_sep|>", "<|fim_pad|>", "<|endoftext|>")
    assert prompt(qwen, "a", "b", files).replace("|file_sep|", "").replace("|", "") == (
        "<repo_name>myproject\n<>f\nx<>g\ny<>filename\n<fim_prefix>a<fim_suffix>b<fim_middle>"
    )
    assert len(fim_of(qwen).ends) == 7
    plain = prompt(tokenizer(*FAMILIES[3], bos="<s>"), "a", "b", files).replace("|", "")
    snippet = "\n\n--- snippet ---\n\n"
    assert plain == f"<s>{snippet}x{snippet}y<｜fim▁begin｜>a<｜fim▁hole｜>b<｜fim▁end｜>".replace("｜", "｜")


@pytest.mark.parametrize("is_special", [True, False])
def test_spellings_in_text_stay_text(is_special):
    text = tokenizer(*FAMILIES[0], "<|file_sep|>", "<|im_end|>", is_special=is_special)
    spelled = "<|fim_middle|>" if not is_special else "<|fim_middle|><|im_end|>"
    ids = fim_of(text).prompt(spelled, spelled, [(spelled, spelled)])
    special = [name for n in ids if len(name := text.backend.id_to_token(n)) > 1]
    assert special == ["<|file_sep|>", "<|file_sep|>", *FAMILIES[0]]
    assert text.backend.decode(ids, skip_special_tokens=False).count(spelled) >= 4


def test_a_prompt_is_cut_to_its_limit():
    text, files = tokenizer(*FAMILIES[0], "<|file_sep|>"), [("f", "x" * 30), ("g", "y" * 30)]
    size = lambda *arguments: len(fim_of(text).prompt(*arguments))
    assert size("a" * 40, "b" * 20, files, 1000) == size("a" * 40, "b" * 20, files)
    one = fim_of(text).prompt("a" * 40, "b" * 20, files, 110)
    assert len(one) <= 110 and one == fim_of(text).prompt("a" * 40, "b" * 20, files[1:])
    assert fim_of(text).prompt("a" * 40, "b" * 20, files, 70) == fim_of(text).prompt("a" * 40, "b" * 20)
    for limit in (7, 20, 43):
        cut = prompt(text, "x" * 40 + "a", "b" + "y" * 40, files, limit)
        assert (
            cut.count("|x") + 1 <= limit
            and "a|<|fim_suffix|>|b" in cut
            and len(fim_of(text).prompt("a" * 90, "b" * 9, (), limit)) <= limit
        )
    # Later prompts start alike.
    starts = {tuple(fim_of(text).prompt("abcdefgh" * n, "", (), 67))[:9] for n in range(12, 14)}
    assert len(starts) == 1


def test_a_model_without_the_tokens_is_an_error():
    with pytest.raises(PipelineError, match="no fill-in-the-middle"):
        fim_of(tokenizer("<|im_end|>"))


@pytest.mark.parametrize("pieces", [["a\n    b\n\n", "    c\n", "  ", "d\n"], list("a\n    b\n\n    c\n  d\n")])
def test_a_line_with_less_indentation_ends_the_text(pieces):
    def text(indent: int, seconds: float | None = None) -> str:
        stops = LineStops((), indent, seconds)
        return "".join(stops.add(piece) for piece in pieces) + stops.add("", final=True)

    full = "a\n    b\n\n    c\n  d\n"
    assert (text(0), text(2), text(4), text(5)) == (full, full, "a\n    b\n\n    c", "a")
    assert text(0, seconds=-1) == "a" and text(0, seconds=99) == full


def test_stop_strings_still_end_the_text():
    stops = LineStops(["c"], indent=4, seconds=60)
    assert stops.add("a\n") == "a" and stops.add("    bc") == "\n    b" and stops.stopped and stops.met == "c"
