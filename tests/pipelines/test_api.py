"""The examples of docs/python.md run, in their order, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import castiron
from castiron.reference import tiny
from tests.pipelines import toy_text

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_run(tmp_path, capsys):
    bundle, checkpoint = toy_text.write(tmp_path / "bundle"), tiny.tiny_model("llama", tmp_path / "checkpoint")
    places = {
        "build/smollm2-135m-instruct": bundle, "smollm2-135m-instruct": bundle, "models/my-fine-tune": checkpoint,
        "build/my-fine-tune": tmp_path / "out",
    }  # fmt: skip
    names: dict = {}
    for block in BLOCKS:
        code = re.sub(r'"((build|models)/[^"]*|smollm2[^"]*)"', lambda found: repr(str(places[found[1]])), block)
        exec(compile(code, str(PAGE), "exec"), names)
    told = capsys.readouterr().out
    assert "context of 24" in told and "<castiron.Model toy: llama" in told


def test_what_the_api_names_is_there_and_the_page_shows_each_call():
    for name in set(castiron.__all__) - {"__version__"}:
        assert getattr(castiron, name).__doc__
    for call in (
        ".prefill(",
        ".step(",
        ".logits(",
        ".fork(",
        ".rewind(",
        "generate(",
        ".stream(",
        "generate_many(",
        ".turn(",
        ".chat(",
        "castiron.load(",
        "castiron.compile(",
        "castiron.open(",
    ):
        assert any(call in block for block in BLOCKS), call
