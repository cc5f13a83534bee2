"""A model that also sees: its text part is compiled, and what is left out is named."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, Qwen3_5ForConditionalGeneration
from transformers.utils import logging

from castiron.pipelines import cli
from castiron.pipelines.checkpoints import open_checkpoint
from castiron.reference import hf, tiny
from tests.emitter.family_harness import WIDTHS, Agreement, Pair, prompt

VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Qwen 3.5 with eyes and with a head for several tokens, whose text part has the weights of a tiny model."""
    place = tmp_path_factory.mktemp("seeing")
    tiny.tiny_model("qwen3_5_text", place / "text")
    text = {**tiny.COMMON, **tiny.FAMILIES["qwen3_5_text"]}
    logging.disable_progress_bar()
    whole = Qwen3_5ForConditionalGeneration(AutoConfig.for_model("qwen3_5", text_config=text, vision_config=VISION))
    whole.save_pretrained(place / "whole")
    path = place / "whole" / "model.safetensors"
    drawn = load_file(place / "text" / "model.safetensors").items()
    tensors = load_file(path) | {re.sub(r"^model\.", "model.language_model.", name): values for name, values in drawn}
    save_file({**tensors, "mtp.fc.weight": np.ones((2, 2), np.float32)}, path)
    return place / "whole"


def test_the_text_part_is_that_of_transformers(directory):
    models = Pair(hf.load(directory, threads=1), open_checkpoint(directory))
    tokens = prompt(211, 20)
    expected, ours, agreement = hf.logits(models.oracle, tokens), models.ours(), Agreement()
    agreement.add(ours.prefill(tokens[:19], WIDTHS[1])[1], expected[18])
    agreement.add(ours.step(tokens[19])[1], expected[19])
    agreement.check()


def test_what_is_left_out_is_named(directory, capsys):
    eyes = sum(name.startswith("model.visual.") for name in load_file(directory / "model.safetensors"))
    assert open_checkpoint(directory).left_out == {"model.visual": eyes, "mtp": 1}
    assert cli.main(["inspect", str(directory)]) == 0
    shown = capsys.readouterr().out
    assert f"left out {eyes} tensors of model.visual, 1 tensor of mtp" in " ".join(shown.split())


@pytest.mark.parametrize(("whole", "part", "tied"), [(True, False, True), (False, True, True), (None, None, False)])
def test_the_head_is_tied_where_either_says_so(directory, tmp_path, whole, part, tied):
    config = json.loads((directory / "config.json").read_text())
    for keys, value in ((config, whole), (config["text_config"], part)):
        keys["tie_word_embeddings"] = value
    (tmp_path / "model.safetensors").symlink_to(directory / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is tied
