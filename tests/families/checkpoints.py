"""Random checkpoints and bundles of the small families here, and of HF's hybrids."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.numpy import save_file

from castiron.emitter import models
from castiron.pipelines.compile.compiler import compile_model
from castiron.pipelines.compile.options import Options
from castiron.reference import hf
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle import Bundle, open_bundle
from tests.families import decaying_sum, ring
from tests.support import served

FAMILIES: dict[str, ModuleType] = {"decaying_sum": decaying_sum, "ring": ring}
VOCAB = len(served.SPECIAL) + len(served.LETTERS)
# HF's model types with recurrent states of each kind, one layer of it and one of attention.
HYBRIDS: dict[str, dict] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4},
}
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_LIMITS = {"max_position_embeddings": 126, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@contextmanager
def known() -> Iterator[None]:
    """Make the small families known to castiron inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "FAMILIES", (*models.FAMILIES, *FAMILIES))
        for name, module in FAMILIES.items():
            patch.setitem(sys.modules, f"castiron.emitter.models.{name}", module)
        yield


def config_of(family: str) -> dict:
    return {"model_type": family, "vocab_size": VOCAB, **FAMILIES[family].CONFIG}


def weights_of(family: str) -> dict[str, np.ndarray]:
    """Return random weights with which logits are spread and early tokens matter."""
    rng = np.random.default_rng(5)
    shapes = FAMILIES[family].shapes(config_of(family))
    return {name: (rng.normal(size=shape) * 2 / shape[-1] ** 0.5).astype(np.float32) for name, shape in shapes.items()}


def logits_of(family: str, checkpoint: Path, tokens: list[int]) -> list[np.ndarray]:
    """Return logits [vocab] after each token, by the family's NumPy definition or by HF."""
    if family in HYBRIDS:
        return list(hf.logits(hf.load(checkpoint, threads=1), tokens))
    return list(FAMILIES[family].define(config_of(family), weights_of(family), tokens))


def write(family: str, directory: Path) -> Path:
    """Write the checkpoint, with a tokenizer of one token per character."""
    directory.mkdir(parents=True)
    if family in HYBRIDS:
        tiny_model(family, directory, **_SIZES, **_LIMITS, **HYBRIDS[family])
    else:
        (directory / "config.json").write_text(json.dumps(config_of(family)))
        save_file(weights_of(family), directory / "model.safetensors")
    served.tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": served.TEMPLATE, "eos_token": "</s>"}))
    return directory


@functools.cache
def bundle(family: str, lowering: str, directory: Path) -> Bundle:
    """Compile one bundle per process, beside its checkpoint, with batches of 2 and 4 and verify_4."""
    checkpoint = write(family, directory / family / lowering / "checkpoint")
    options = Options(lowering=lowering, batch=(2, 4), speculate=(4,))
    with known():
        return open_bundle(compile_model(checkpoint, directory / family / lowering / "bundle", options).bundle)
