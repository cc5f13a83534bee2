"""Embeddings of real models are those of sentence-transformers.

The reference is transformers in f32 with the pooling, dense layers and normalisation of the
model's modules.json, as sentence-transformers computes them.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

import castiron
from castiron.pipelines import evaluate
from tests.models.checkpoints import fetch
from tests.support.encoders import Oracle

TEXT = (Path(evaluate.__file__).parent / "evaluate_text.txt").read_text(encoding="utf-8")
OTHER = [
    "Hello",
    "  spaces  at\tends \n",
    "Ärger, naïve café E\u0301",
    "你好，世界！",
    "👩\u200d👩\u200d👧 🇩🇪",
    "<s> [SEP] </s>",
    "?",
]


def texts() -> list[str]:
    """Return 100 texts: of several alphabets, and from five characters to more than any limit."""
    lengths = np.linspace(5, 1200, 99 - len(OTHER)).astype(int)
    return [*OTHER, *(TEXT[400 * i : 400 * i + length] for i, length in enumerate(lengths)), TEXT[:12_000]]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "prompt"), [("all-minilm-l6-v2", None), ("embeddinggemma-300m", "query")])
def test_embeddings_are_those_of_sentence_transformers(name, prompt, tmp_path):
    folder, given = fetch(name), texts()
    assert len(given) == 100
    bundle = castiron.compile(folder, tmp_path / "bundle")
    with castiron.load(bundle) as model:
        found = model.embed(given, prompt_name=prompt).astype(np.float64)
    oracle, tokenizer = Oracle(folder), AutoTokenizer.from_pretrained(folder)
    read = lambda file: json.loads((folder / file).read_text())
    before = read("config_sentence_transformers.json")["prompts"][prompt] if prompt else ""
    limit = read("sentence_bert_config.json")["max_seq_length"]
    encode = lambda text: tokenizer((before + text).strip(), truncation=True, max_length=limit)["input_ids"]
    expected = np.array([oracle.vector(encode(text)) for text in given], np.float64)
    cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    print(f"{name}: smallest cosine 1 - {1 - cosines.min():.1e}")
    assert cosines.min() >= 1 - 1e-6
