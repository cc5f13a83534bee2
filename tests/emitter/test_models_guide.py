"""The porting guide, followed to the letter: its family is exact, and its mistake is found where it says."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from castiron.emitter import layers, models
from castiron.emitter.models.config import ConfigReader
from castiron.pipelines.cli import main
from castiron.reference import hf, tiny
from tests.emitter.family_harness import WIDTHS, Agreement, pair, prompt

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "porting.md").read_text(encoding="utf-8")
BLOCKS = {name.split(",")[0]: code for name, code in re.findall(r"```python\n# (.*?)\n(.*?)```", GUIDE, re.DOTALL)}
FAMILY = BLOCKS["emitter/models/gemma.py"]
SHAPES = ast.literal_eval(BLOCKS["tests/emitter/test_models.py"])["gemma"]
DIFF_COMMAND = re.search(r"castiron diff DIR (.*)", GUIDE)[1].split()
DIFF_OUTPUT = re.search(r"<!-- diff -->\n```\n(.*?)```", GUIDE, re.DOTALL)[1]


@pytest.fixture
def followed(monkeypatch):
    """`followed(source)` puts the guide's family, or a variant of it, in its place."""

    def put(source: str = FAMILY) -> None:
        module = ModuleType("castiron.emitter.models.gemma")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(source, "docs/porting.md", "exec"), module.__dict__)
        monkeypatch.setattr(models, "FAMILIES", (*models.FAMILIES, "gemma"))
        for kind, row in ast.literal_eval(BLOCKS["reference/tiny.py"]).items():
            monkeypatch.setitem(tiny.FAMILIES, kind, row)

    return put


def test_the_guide_ports_a_family_that_is_not_there():
    assert "gemma" not in models.FAMILIES
    assert len(FAMILY.splitlines()) < 300


@pytest.mark.parametrize("shape", range(len(SHAPES)))
def test_the_family_of_the_guide_is_exact(followed, shape, tmp_path):
    followed()
    both = pair("gemma", tmp_path, seed=shape, **SHAPES[shape])
    tokens = prompt(both.checkpoint.config["vocab_size"], 30)
    expected = hf.logits(both.oracle, tokens)
    for lowering in ("portable", "kernels"):
        ours, agreement = both.ours(lowering), Agreement()
        agreement.add(ours.prefill(tokens[:27], WIDTHS[1])[1], expected[26])
        for position in range(27, 30):
            agreement.add(ours.step(tokens[position])[1], expected[position])
        agreement.check()


def test_the_mistake_of_the_guide_is_found_where_it_says(followed, tmp_path, capsys):
    followed(FAMILY.replace("scale=c.head_dim**-0.5", "scale=c.hidden**-0.5"))
    directory = tiny.tiny_model("gemma", tmp_path)
    assert main(["diff", str(directory), *DIFF_COMMAND]) == 1
    assert _without_digits(capsys.readouterr().out) == _without_digits(DIFF_OUTPUT)


def _without_digits(text: str) -> str:
    """Differences are rounding in part: only their size counts."""
    return re.sub(r"\d\.\de-\d\d", lambda number: "large" if float(number[0]) > 1e-3 else "small", text).strip()


def test_what_the_guide_names_is_there():
    for path in re.findall(r"`((?:emitter|reference|pipelines|tests)/[\w./]+\.py)`", GUIDE):
        assert (ROOT / path).is_file(), path
    rows = re.findall(r"^\| .* \| (.*) \|$", GUIDE, re.MULTILINE)
    names = {name for cell in rows for name in re.findall(r"`(\w+)", cell)} - {"castiron"}
    assert {"embedding", "linear_parts", "attention", "route", "softcapped"} <= names
    assert all(hasattr(layers, name) for name in names), names
    for name in ("take", "nullable", "require", "unused", "finish"):
        assert hasattr(ConfigReader, name)


def test_the_tiny_model_of_the_guide_notices_a_lost_detail(followed, tmp_path):
    followed(FAMILY.replace('"input_layernorm", c.eps, plus_one', '"input_layernorm", c.eps'))
    both = pair("gemma", tmp_path)
    tokens = prompt(both.checkpoint.config["vocab_size"], 30)
    expected = hf.logits(both.oracle, tokens)[-1]
    _, logits = both.ours().prefill(tokens, WIDTHS[1])
    assert np.abs(logits - expected).max() > 0.01 * np.abs(expected).max()
