"""Test castiron diff: a correct model agrees with HF, and the first wrong module is found."""

from __future__ import annotations

import json

import pytest

from castiron.emitter.graph import ops
from castiron.emitter.lowering import portable
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli.main import main
from castiron.pipelines.evaluate.diff import compare
from castiron.reference import tiny

TOKENS = [5, 17, 3, 99, 42, 8]


@pytest.fixture(scope="module")
def checkpoint_dir(tmp_path_factory):
    return tiny.tiny_model("llama", tmp_path_factory.mktemp("diff") / "llama", tie_word_embeddings=False)


@pytest.mark.parametrize("lowering", ["portable", "kernels"])
def test_every_module_of_a_correct_model_agrees(checkpoint_dir, lowering):
    found = compare(open_checkpoint(checkpoint_dir), TOKENS, 1e-3, lowering)
    assert found["first"] is None and found["operations"] == []
    names = [each["module"] for each in found["modules"]]
    assert names[0] == "model.embed_tokens" and names[-1] == "lm_head" and "model.layers.2" in names


def test_a_wrong_rotation_is_found_in_the_first_attention(checkpoint_dir, monkeypatch, capsys):
    def backwards(op, x, cos, sin, start):
        return portable.rope(op, x, cos, _Negated(sin), start)

    class _Negated:
        def __init__(self, stored):
            self.stored = stored

        def value(self):
            return ops.negate(self.stored.value())

    monkeypatch.setattr(portable, "_numbers", lambda v: v.value() if hasattr(v, "value") else v)
    monkeypatch.setitem(portable.RULES, "rope", backwards)
    assert main(["diff", str(checkpoint_dir), "--tokens", ",".join(map(str, TOKENS)), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["equal"] and found["first"] == "model.layers.0.self_attn.o_proj"
    assert ["rope", "model.layers.0.self_attn"] in found["operations"]


def test_a_forgotten_residual_is_found_in_its_block(checkpoint_dir, monkeypatch):
    from castiron.emitter.models import decoder

    monkeypatch.setattr(decoder, "add", lambda x, y: y)
    found = compare(open_checkpoint(checkpoint_dir), TOKENS, 1e-3)
    assert found["first"] == "model.layers.0.post_attention_layernorm"


def test_one_token_is_rejected(checkpoint_dir, capsys):
    assert main(["diff", str(checkpoint_dir), "--tokens", "5"]) == 1
    assert "needs at least 2" in capsys.readouterr().err
