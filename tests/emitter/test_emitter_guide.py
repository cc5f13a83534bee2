"""docs/emitter.md: its Python runs, and prints what the page shows."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs/emitter.md").read_text(encoding="utf-8")


def test_the_page_runs_and_prints_what_it_shows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    names: dict = {}
    output = io.StringIO()
    for language, block in blocks:
        if language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(block, "docs/emitter.md", "exec"), names)
        else:
            assert output.getvalue() == block
    assert [language for language, _ in blocks].count("text") == 2
