"""The toy bundle, with a tokenizer of its 32 tokens and a chat template."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from castiron.vmfb.bundle import BundleWriter
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.manifest import MODEL, TEMPLATE, TOKENIZER, WEIGHTS, Tokens
from castiron.vmfb.targets import TARGETS
from castiron.vmfb.weights import write_irpa
from tests.vmfb import toy, toy_bundle

CONTEXT, WIDTHS, EOS = 24, (4, 8), 24
TEMPLATE_TEXT = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}a{% endif %}"
# Enough of a llama's config for bench to count its work.
CONFIG = {
    "model_type": "llama", "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1,
    "head_dim": 4, "vocab_size": toy.VOCAB, "tie_word_embeddings": True,
}  # fmt: skip


def tokenizer() -> Tokenizer:
    """One token a character; token EOS is special."""
    letters = [chr(ord("a") + index) for index in range(EOS)] + ["</s>", *"é你+. 01"]
    assert len(letters) == toy.VOCAB
    found = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="."))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken("</s>", special=True)])
    return found


def write(directory: Path, *, text: bool = True, source: dict | None = None) -> Path:
    """Writes the bundle and returns its directory; without `text` it takes token ids only."""
    target = TARGETS["host"]
    with BundleWriter(directory) as writer:
        compile_mlir(toy.module_text(CONTEXT, WIDTHS), target, writer.path(MODEL))
        entries = [(name, array, (array.shape, array.dtype)) for name, array in toy.weights().items()]
        written = write_irpa(writer.path(WEIGHTS), entries)
        if text:
            writer.write(TOKENIZER, tokenizer().to_str())
            writer.write(TEMPLATE, TEMPLATE_TEXT)
        manifest = replace(
            toy_bundle.manifest(CONTEXT, WIDTHS, target), config=CONFIG, tokens=Tokens(None, (EOS,)), source=source or {}
        )
        writer.commit(manifest, {WEIGHTS: written})
    return Path(directory)


def read_json(captured: str) -> dict:
    """The one object that a command with --json prints; fails for anything more."""
    assert captured.count("\n") == 1
    return json.loads(captured)
