"""docs/emitter.md: its Python runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import numpy as np

PAGE = (Path(__file__).parents[2] / "docs/emitter.md").read_text(encoding="utf-8")


def run_page(directory, monkeypatch) -> dict:
    """Run the page's Python in `directory`; return its names."""
    monkeypatch.chdir(directory)
    names: dict = {}
    output = io.StringIO()
    for language, block in re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE):
        if language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block, "docs/emitter.md", "exec"), names)
        else:
            assert output.getvalue() == block
    return names


def test_the_page_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    names = run_page(tmp_path, monkeypatch)
    assert PAGE.count("```text\n") == 2
    dialects = set(re.findall(r"\b([a-z_]+)\.[a-z_]+ ", names["portable"])) - {"func"}
    assert dialects == {"stablehlo"}


def test_xla_runs_the_portable_text(tmp_path, monkeypatch):
    names = run_page(tmp_path, monkeypatch)
    (code,) = re.findall(r"<!-- xla -->\n```py\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    exec(compile(code, "docs/emitter.md", "exec"), names)
    x, tensors = names["x"], names["tensors"]
    gate, up = x @ tensors["gate"].T, x @ tensors["up"].T
    expected = (gate / (1 + np.exp(-gate)) * up) @ tensors["down"].T
    np.testing.assert_allclose(np.asarray(names["result"]), expected, atol=1e-4)
