"""The text part of a vision model is compiled, and the dropped parts are named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import logging

from castiron.emitter.models import FAMILIES
from castiron.pipelines.checkpoints.hf.tensor_layouts import TEXT_PARTS, text_config
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.reference import tiny
from tests.emitter.family_harness import Pair, assert_same_logits, prompt

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
QWEN = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
PATCHES = {**SIZES, "image_size": 28, "patch_size": 14}
# Vision model -> family of its text part, config of its vision part, and other config keys.
MODELS = {
    "gemma3": ("gemma3_text", {**PATCHES, "model_type": "siglip_vision_model"}, {"mm_tokens_per_image": 4}),
    "gemma4": (
        "gemma4_text",
        {**SIZES, "model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
        {"audio_config": None},
    ),
    "lfm2_vl": ("lfm2", {**SIZES, "model_type": "siglip2_vision_model"}, {}),
    "lfm3_vl": ("lfm3", SIZES, {}),
    "mistral3": ("ministral3", {**PATCHES, "model_type": "pixtral", "head_dim": 8}, {}),
    "qwen3_5": ("qwen3_5_text", QWEN, {}),
    "qwen3_vl": ("qwen3", {**QWEN, "deepstack_visual_indexes": [0]}, {}),
    "smolvlm": ("llama", PATCHES, {}),
}


def test_every_text_part_is_of_a_family():
    assert set(TEXT_PARTS.values()) <= set(FAMILIES)
    # The other two have the same text part as a model that is tested.
    assert set(TEXT_PARTS) - set(MODELS) == {"idefics3", "qwen3_5_moe"}


def vision_model(complete: str, folder: Path) -> Path:
    """Save a vision model of transformers whose text part has the weights of a tiny model."""
    family, vision, rest = MODELS[complete]
    text = {**tiny.COMMON, **tiny.FAMILIES[family], **({} if complete == "qwen3_vl" else {"model_type": family})}
    logging.disable_progress_bar()
    model = AutoModelForImageTextToText.from_config(
        AutoConfig.for_model(complete, text_config=text, vision_config=vision, **rest), dtype=torch.float32
    )
    model.save_pretrained(folder / "whole")
    path = tiny.tiny_model(family, folder / "text", tie_word_embeddings=model.config.tie_word_embeddings)
    drawn, tensors = load_file(path / "model.safetensors"), load_file(folder / "whole" / "model.safetensors")
    for name in tensors:
        own = re.sub(r"^(model\.(language_model|text_model)|language_model\.model)\.", "model.", name)
        tensors[name] = drawn.get(own, tensors[name])
    save_file(tensors, folder / "whole" / "model.safetensors", metadata={"format": "pt"})
    return folder / "whole"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Qwen 3.5 with vision and a head for multi-token prediction."""
    path = vision_model("qwen3_5", tmp_path_factory.mktemp("seeing"))
    tensors = load_file(path / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": np.ones((2, 2), np.float32)}, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("complete", MODELS)
def test_the_text_part_is_that_of_transformers(complete, tmp_path):
    path = vision_model(complete, tmp_path)
    oracle = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    models, tokens = Pair(oracle, open_checkpoint(path)), prompt(211, 20)
    assert models.checkpoint.left_out
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0].numpy()
    assert_same_logits(models.ours(), tokens, expected, steps=1)


def test_sizes_that_published_configs_leave_out_are_those_of_transformers():
    """The config is Gemma 3 4B's."""
    inner = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34}
    complete = {"model_type": "gemma3", "text_config": {**inner, "sliding_window": 1024}}
    theirs = AutoConfig.for_model(**complete).text_config
    ours = text_config(complete, ["language_model.model.norm.weight"])
    assert all(ours[key] == getattr(theirs, key) for key in ours)
    assert not text_config(complete, ["language_model.lm_head.weight"])["tie_word_embeddings"]
    for damaged in (["gemma3_text"], None):
        assert text_config({**complete, "text_config": {**inner, "model_type": damaged}}, [])["model_type"] == "gemma3_text"


def test_inspect_names_dropped_parts(directory, capsys):
    vision = sum(name.startswith("model.visual.") for name in load_file(directory / "model.safetensors"))
    assert open_checkpoint(directory).left_out == {"model.visual": vision, "mtp": 1}
    assert cli.main(["inspect", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert f"left out {vision} tensors of model.visual, 1 tensor of mtp" in " ".join(shown.split())


@pytest.mark.parametrize(("complete", "part", "tied"), [(True, False, True), (False, True, True), (None, None, False)])
def test_the_head_is_tied_if_either_config_ties_it(directory, tmp_path, complete, part, tied):
    config = json.loads((directory / "config.json").read_text())
    for keys, value in ((config, complete), (config["text_config"], part)):
        keys["tie_word_embeddings"] = value
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is tied
