"""HF's model as a reference: f32, eager attention, ties to the lowest index, activations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig

from castiron.reference import hf
from castiron.reference.tiny import tiny_model
from tests.support.hf_to_gguf import convert

PROMPT = [5, 17, 90, 3, 44]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tiny_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(directory):
    return hf.load(directory, threads=1)


def test_models_are_f32_and_plain(model, tmp_path):
    assert model.dtype == torch.float32 and not model.training
    assert model.config._attn_implementation == "eager"
    assert hf.load(tiny_model("mixtral", tmp_path)).config._experts_implementation == "eager"


def test_greedy_tokens_are_the_argmax_of_an_uncached_run(model):
    """The reference computes the complete sequence for every token, without a cache."""
    greedy, tokens = hf.greedy(model, PROMPT, 8), list(PROMPT)
    for token, margin in zip(greedy.tokens, greedy.margins, strict=True):
        last = hf.logits(model, tokens)[-1]
        assert token == last.argmax()
        assert margin == pytest.approx(float(np.sort(last)[-1] - np.sort(last)[-2]), abs=1e-3)
        tokens.append(token)


def test_end_tokens_do_not_end(model):
    known = hf.greedy(model, PROMPT, 6).tokens
    model.config.eos_token_id = model.generation_config.eos_token_id = known[1]
    assert hf.greedy(model, PROMPT, 6).tokens == known


def test_ties_go_to_the_lowest_index(directory):
    model = hf.load(directory)
    with torch.no_grad():
        best = hf.greedy(model, PROMPT, 1).tokens[0]
        for twin in (2, 150):
            model.lm_head.weight[twin] = model.lm_head.weight[best]
    greedy = hf.greedy(model, PROMPT, 1)
    assert greedy.tokens == [min(2, best)] and greedy.margins == [0.0]


def test_activations_are_found_by_module_path(model):
    names = ["model.embed_tokens", "model.layers.1.self_attn", "model.layers.2", "model.norm", "lm_head", "model"]
    found = hf.activations(model, PROMPT, names)
    assert set(found) == set(names)
    table = model.model.embed_tokens.weight.detach().numpy()
    assert np.array_equal(found["model.embed_tokens"], table[PROMPT])
    assert np.array_equal(found["lm_head"], hf.logits(model, PROMPT))
    assert np.array_equal(found["model"], found["model.norm"]) and found["model.layers.2"].shape == (5, 64)
    weight = model.lm_head.weight.detach().numpy()
    np.testing.assert_allclose(found["model.norm"] @ weight.T, found["lm_head"], rtol=1e-4, atol=1e-4)


def test_capture_ends_with_its_block_and_rejects_unknown_names(model):
    with hf.capture(model, ["model.norm"]) as found:
        hf.logits(model, PROMPT)
        assert found["model.norm"].shape == (5, 64)
        hf.logits(model, PROMPT[:2])
        assert found["model.norm"].shape == (2, 64)
    found.clear()
    hf.logits(model, PROMPT)
    assert found == {}
    with pytest.raises(ValueError, match="LlamaForCausalLM has no submodule model.layers.9, norm"):
        hf.activations(model, PROMPT, ["model.norm", "model.layers.9", "norm"])


def test_gguf_is_read_by_transformers(tmp_path):
    """transformers, not castiron, undoes the rotary permutation of the file."""
    # Without a tokenizer in the file, transformers takes Llama's default vocabulary.
    directory = tiny_model("llama", tmp_path / "hf", vocab_size=32000)
    model = hf.load(directory)
    path = convert(directory, AutoConfig.from_pretrained(directory), tmp_path / "tiny.gguf")
    again = hf.load(path)
    assert again.dtype == torch.float32 and again.config._attn_implementation == "eager"
    np.testing.assert_allclose(hf.logits(again, PROMPT), hf.logits(model, PROMPT), rtol=1e-4, atol=1e-4)
