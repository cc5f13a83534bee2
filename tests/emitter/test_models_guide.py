"""The family of the porting guide is exact, and its mistake is found as the guide shows."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from castiron.emitter import layers, models
from castiron.emitter.graph.types import EmitError
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig
from castiron.pipelines.cli.main import main
from castiron.reference import hf, tiny
from tests.emitter import test_models
from tests.emitter.family_harness import assert_same_logits, pair, prompt

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
BLOCKS = {name.split(",")[0]: code for name, code in re.findall(r"```python\n# (.*?)\n(.*?)```", GUIDE, re.DOTALL)}
FAMILY = BLOCKS["emitter/models/gemma.py"]
SHAPES = ast.literal_eval(BLOCKS["tests/emitter/test_models.py"])["gemma"]
DIFF_COMMAND = re.search(r"castiron diff DIR (.*)", GUIDE)[1].split()
DIFF_OUTPUT = re.search(r"<!-- diff -->\n```\n(.*?)```", GUIDE, re.DOTALL)[1]

# HF's `GPTNeoXForCausalLM` with its parallel residual, without the guide's `fused_heads`.
GPT_NEOX = """
from castiron.emitter.graph.ir import Value, scope
from castiron.emitter.layers import activation, attention, embedding, layer_norm, linear, rope, rotary_tables, split_heads, wanted_rows
from castiron.emitter.models.config import ConfigReader
from castiron.emitter.models.decoder import DecoderConfig as Config
from castiron.emitter.graph.ops import add, slice_
from castiron.emitter.layers.step import Step

def read(c):
    c.require("hidden_act", "gelu")
    c.require("use_parallel_residual", True)
    c.require("attention_bias", True)
    c.unused("classifier_dropout", "num_key_value_heads")
    heads, eps = c.take("num_attention_heads"), c.number("layer_norm_eps", 1e-5)
    return c.read(Config, partial=0.25, kv_heads=heads, eps=eps, hidden_act="gelu")

def forward(step, c):
    tables = rotary_tables(step, c.rotary)
    with scope("gpt_neox"):
        x = embedding(step, "embed_in", c.vocab, c.hidden)
        for layer in range(c.layers):
            with scope(f"layers.{layer}"):
                h = layer_norm(step, x, "input_layernorm", c.eps)
                with scope("attention"):
                    q, k, v = fused_heads(step, c, h)
                    q, k = rope(step, q, tables), rope(step, k, tables)
                    out = attention(step, layer, q, k, v, scale=c.head_dim**-0.5)
                    attended = linear(step, out, "dense", c.hidden, True)
                h = layer_norm(step, x, "post_attention_layernorm", c.eps)
                with scope("mlp"):
                    h = activation(linear(step, h, "dense_h_to_4h", c.intermediate, True), c.hidden_act)
                    x = add(x, add(attended, linear(step, h, "dense_4h_to_h", c.hidden, True)))
        x = layer_norm(step, wanted_rows(step, x), "final_layer_norm", c.eps)
    return linear(step, x, "embed_out", c.vocab)
"""


def put(monkeypatch, name: str, source: str, tiny_row: dict) -> None:
    """Make `source` the family `name`."""
    module = ModuleType(f"castiron.emitter.models.{name}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, "docs/porting.md", "exec"), module.__dict__)
    monkeypatch.setattr(models, "FAMILIES", (*models.FAMILIES, name))
    monkeypatch.setitem(tiny.FAMILIES, name, tiny_row)


@pytest.fixture
def followed(monkeypatch):
    """Return a function that replaces the guide's family by a variant."""
    return lambda source: put(monkeypatch, "gemma", source, tiny.FAMILIES["gemma"])


def test_the_guide_shows_the_family_that_is_there():
    assert (ROOT / "emitter" / "models" / "gemma.py").read_text(encoding="utf-8") == FAMILY
    assert ast.literal_eval(BLOCKS["reference/tiny.py"])["gemma"] == tiny.FAMILIES["gemma"]
    assert test_models.SHAPES["gemma"] == SHAPES
    assert len(FAMILY.splitlines()) < 90


@pytest.fixture
def gpt_neox(monkeypatch):
    put(monkeypatch, "gpt_neox", GPT_NEOX + BLOCKS["emitter/models/gpt_neox.py"], {"layer_norm_eps": 0.1})


def test_the_fused_projection_of_the_guide_is_exact(gpt_neox, tmp_path):
    both = pair("gpt_neox", tmp_path)
    tokens = prompt(both.checkpoint.config["vocab_size"], 30)
    for lowering in ("portable", "kernels"):
        assert_same_logits(both.ours(lowering), tokens, hf.logits(both.oracle, tokens))


def test_diff_finds_the_mistake_of_the_guide(followed, tmp_path, capsys):
    followed(FAMILY.replace("scale=c.head_dim**-0.5", "scale=c.hidden**-0.5"))
    directory = tiny.tiny_model("gemma", tmp_path)
    assert main(["diff", str(directory), *DIFF_COMMAND]) == 1
    assert _without_digits(capsys.readouterr().out) == _without_digits(DIFF_OUTPUT)


def _without_digits(text: str) -> str:
    """Replace differences, which are rounding in part, by their size."""
    return re.sub(r"\d\.\de-\d\d", lambda number: "large" if float(number[0]) > 1e-3 else "small", text).strip()


def test_the_tests_of_the_guide_run_where_only_compile_llm_was_made(tmp_path):
    """`make test-family` installs pytest's packages, which `make compile-llm` does not."""
    assert "python -m pytest" not in GUIDE
    (line,) = re.findall(r"^    (make test.*)$", GUIDE, re.MULTILINE)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("pyproject.toml", "requirements.lock", "requirements-test.lock"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "pipelines").mkdir()
    planned = subprocess.run(["bash", "-c", f"{line} --dry-run"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert planned.stdout.index("install -r requirements-test.lock") < planned.stdout.index("tests/emitter/test_models*.py")


def test_what_the_guide_names_is_there():
    for path in re.findall(r"`((?:emitter|reference|pipelines|tests)/[\w./]+\.py)`", GUIDE):
        assert (ROOT / path).is_file(), path
    modules = GUIDE[GUIDE.index("| HF | here |") : GUIDE.index("A fused projection")]
    rows = re.findall(r"^\| .* \| (.*) \|$", modules, re.MULTILINE)
    names = {name for cell in rows for name in re.findall(r"`(\w+)", cell)} - {"castiron"}
    assert {"embedding", "linear_parts", "attention", "route", "softcapped"} <= names
    assert all(hasattr(layers, name) for name in names), names
    methods = {name for name, value in vars(ConfigReader).items() if name[0] != "_" and callable(value)}
    assert {name for name in methods if f"`{name}(" in GUIDE or f"`{name}`" in GUIDE or f"c.{name}(" in GUIDE} >= methods - {
        "layer_types", "expert_groups", "rotaries", "frequencies"
    }  # fmt: skip


def test_the_defaults_of_the_guide_are_those_of_read():
    """Absent keys give the values in the guide's table."""
    sizes = {"vocab_size": 10, "hidden_size": 24, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 3,
             "num_key_value_heads": 1}  # fmt: skip
    table = GUIDE[GUIDE.index("| field | key") : GUIDE.index("| method of")]
    found = ConfigReader({**sizes, "max_position_embeddings": 99}).read(DecoderConfig)
    assert found.head_dim == 24 // 3 and "| hidden size / heads |" in table
    assert f"| {found.eps:g} |".replace("1e-06", "1e-6") in table and f"| `{found.hidden_act}` |" in table
    assert not (found.tied or found.attention_bias or found.mlp_bias or found.bidirectional) and table.count("| False |") == 2
    assert found.windows == [None, None] and np.allclose(found.rotary.inv_freq, 10000.0 ** -(np.arange(4) / 4))
    for key in (*sizes, "max_position_embeddings"):
        with pytest.raises(EmitError, match=f"lacks '{key}'"):
            ConfigReader({k: v for k, v in {**sizes, "max_position_embeddings": 99}.items() if k != key}).read(DecoderConfig)
    fields_ = {field.name for field in fields(DecoderConfig)}
    assert fields_ == {name for row in table.strip().splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])}
