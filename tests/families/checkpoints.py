"""Random checkpoints and bundles of models with recurrent states and rings."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from tests.support import served

VOCAB = len(served.SPECIAL) + len(served.LETTERS)
# HF's model type and config of models whose states are all recurrent, and all rings.
FAMILIES: dict[str, tuple[str, dict]] = {
    "mamba": ("granitemoehybrid", {"layer_types": ["linear_attention"] * 2, "mamba_n_heads": 4}),
    "ring": ("mistral", {"sliding_window": 6}),
}
# Models with recurrent states of each kind: one layer of it and one of attention.
HYBRIDS: dict[str, tuple[str, dict]] = {
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "qwen3_5_text": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"]}),
    "granitemoehybrid": (
        "granitemoehybrid",
        {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4},
    ),
}
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_LIMITS = {"max_position_embeddings": 126, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def write(name: str, directory: Path) -> Path:
    """Write the checkpoint, with a tokenizer of one token per character."""
    model_type, config = {**FAMILIES, **HYBRIDS}[name]
    tiny_model(model_type, directory, **_SIZES, **_LIMITS, **config)
    served.tokenizer().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": served.TEMPLATE, "eos_token": "</s>"}))
    return directory


@functools.cache
def bundle(name: str, lowering: str, directory: Path) -> Bundle:
    """Compile one bundle per process, beside its checkpoint, with batches of 2 and 4 and verify_4."""
    checkpoint = write(name, directory / name / lowering / "checkpoint")
    options = Options(lowering=lowering, batch=(2, 4), verify_widths=(4,))
    return open_bundle(compile_model(checkpoint, directory / name / lowering / "bundle", options).bundle)
