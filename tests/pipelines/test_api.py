"""The examples of docs/python.md run, in their order, as a reader would type them."""

from __future__ import annotations

import re
from pathlib import Path

import castiron
from tests.pipelines import toy_text

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
PLACE = "build/smollm2-135m-instruct"


def test_the_examples_run(tmp_path, capsys):
    bundle = toy_text.write(tmp_path / "bundle")
    assert len(BLOCKS) == 10 and PLACE in BLOCKS[0]
    names: dict = {}
    for block in BLOCKS:
        exec(compile(block.replace(PLACE, str(bundle)), str(PAGE), "exec"), names)
    assert "context of 24" in capsys.readouterr().out


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
        "castiron.open(",
    ):
        assert any(call in block for block in BLOCKS), call
