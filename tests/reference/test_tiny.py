"""In small random models every weight matters, tokens vary, and margins exceed rounding."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from castiron.reference import hf
from castiron.reference.tiny import FAMILIES, tiny_model


def prompts(vocab: int = 211) -> list[list[int]]:
    """Return prompts of one token, a few, and more than any window of a tiny model."""
    return [np.random.default_rng(n).integers(3, vocab, n).tolist() for n in (1, 6, 40)]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    made = {}

    def model(family: str):
        if family not in made:
            made[family] = hf.load(tiny_model(family, tmp_path_factory.mktemp(family)), threads=1)
        return made[family]

    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_vary_by_margins_that_are_real(family, models, record_property):
    """The smallest margin is ten times the effect of the order of sums on a logit."""
    model, margins, noise = models(family), [], []
    for prompt in prompts():
        greedy = hf.greedy(model, prompt, 16)
        assert len(set(greedy.tokens)) >= 3, f"{family} repeats itself: {greedy.tokens}"
        uncached = hf.logits(model, prompt + greedy.tokens[:-1])[len(prompt) - 1 :]
        assert uncached.argmax(-1).tolist() == greedy.tokens, "with the cache and without, the tokens are the same"
        top = np.sort(uncached, -1)
        noise.append(np.abs(top[:, -1] - top[:, -2] - greedy.margins).max())
        margins += greedy.margins
    record_property("smallest_margin", min(margins))
    assert min(margins) > 10 * max(noise)
    assert np.median(margins) > 0.1


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_matters(family, models):
    """Logits change clearly when any tensor is zero."""
    model, tokens = models(family), prompts()[2]
    want = hf.logits(model, tokens)
    for name, weight in model.named_parameters():
        saved = weight.detach().clone()
        with torch.no_grad():
            weight.zero_()
            moved = np.abs(hf.logits(model, tokens) - want).max() / want.std()
            weight.copy_(saved)
        assert moved > 0.05, f"{family}: {name} moves no logit by more than {moved:.4f} of their spread"


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    first, again, other = (tiny_model("llama", tmp_path / str(i), seed=s) for i, s in enumerate((0, 0, 1)))
    read = lambda path: (path / "model.safetensors").read_bytes()
    assert read(first) == read(again) != read(other)


def test_settings_and_storage_are_the_callers(tmp_path):
    path = tiny_model("llama", tmp_path, dtype=torch.bfloat16, tie_word_embeddings=True, attention_bias=True, hidden_size=48)
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    assert config["model_type"] == "llama" and config["hidden_size"] == 48 and config["tie_word_embeddings"]
    assert "lm_head.weight" not in tensors and tensors["model.layers.0.self_attn.q_proj.bias"].std() > 0.1
    assert {t.dtype for t in tensors.values()} == {torch.bfloat16}
    assert not list(path.glob("tokenizer*"))
    model = hf.load(path)
    for name, tensor in tensors.items():
        assert torch.equal(model.state_dict()[name], tensor.float())


def test_rejects_an_unknown_family(tmp_path):
    with pytest.raises(ValueError, match="no tiny model of type 'bloom'; use one of llama, mistral"):
        tiny_model("bloom", tmp_path)
