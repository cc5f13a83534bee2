"""The toy bundle, with a tokenizer of its 32 tokens and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from castiron.vmfb.bundle.manifest import TEMPLATE, TOKENIZER, Tokens
from tests.vmfb import toy
from tests.vmfb.toy import CONTEXT, WIDTHS  # noqa: F401

EOS = 24
FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
TEMPLATE_TEXT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
# Enough of a llama's config for bench to count its work.
CONFIG = {
    "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
    "head_dim": 4, "vocab_size": toy.VOCAB, "tie_word_embeddings": True,
}  # fmt: skip


def tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per character; EOS is a special token."""
    letters = [chr(ord("a") + index) for index in range(EOS)] + ["</s>", *"é你+. 01"]
    assert len(letters) == toy.VOCAB
    found = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="."))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken("</s>", special=True)])
    return found


def with_fim(made: Tokenizer, first: int) -> Tokenizer:
    """Return a tokenizer with FIM tokens instead of the four tokens from id `first` on."""
    described = json.loads(made.to_str())
    vocabulary = {name: n for name, n in described["model"]["vocab"].items() if n not in range(first, first + len(FIM))}
    described["model"]["vocab"] = vocabulary | {name: first + n for n, name in enumerate(FIM)}
    changed = Tokenizer.from_str(json.dumps(described))
    changed.add_special_tokens([AddedToken(name, special=True) for name in FIM])
    return changed


def write(directory: Path, *, text: bool = True, source: dict | None = None) -> Path:
    """Write the bundle and return its directory; without `text` it has no tokenizer."""
    files = {TOKENIZER: tokenizer().to_str(), TEMPLATE: TEMPLATE_TEXT} if text else {}
    return toy.write(directory, files=files, config=CONFIG, tokens=Tokens(None, (EOS,)), source=source or {}).path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> str:
    """Return the path of a toy bundle."""
    return str(write(tmp_path_factory.mktemp("bundle") / "toy"))


def read_json(captured: str) -> dict:
    """Return the object that a command with --json printed; fail for more than one line."""
    assert captured.count("\n") == 1
    return json.loads(captured)
