"""Run the examples of docs/python.md in order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import castiron
from castiron.vmfb.cache_folder import cache_folder
from tests.support import served, toy_text

PAGE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_the_examples_run(tmp_path, capsys, monkeypatch):
    # Use a new cache for bundles, and the shared one for compiled modules.
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "compile").symlink_to(cache_folder("compile"))
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    bundle, checkpoint = toy_text.write(tmp_path / "bundle"), served.checkpoint(tmp_path / "checkpoint")
    paths = {
        "build/smollm2-135m-instruct": bundle, "smollm2-135m-instruct": bundle, "models/my-fine-tune": checkpoint,
        "build/my-fine-tune": tmp_path / "out",
    }  # fmt: skip
    names: dict = {}
    for block in BLOCKS:
        code = re.sub(r'"((build|models)/[^"]*|smollm2[^"]*)"', lambda found: repr(str(paths[found[1]])), block)
        exec(compile(code, str(PAGE), "exec"), names)
    reported = capsys.readouterr().out
    assert "context of 24" in reported and "<castiron.Model toy: llama" in reported


@pytest.mark.slow
def test_a_type_checker_follows_the_examples(tmp_path):
    """mypy is strict and finds castiron's types as in a user's project."""
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = true\nfollow_imports = silent\nignore_missing_imports = true\n")
    shown = ("model.generate('x')", "model.generate(['x'])", "model.stream('x')", "bundle", "session.step(1)")
    (tmp_path / "page.py").write_text("\n".join([*BLOCKS, *(f"reveal_type({expression})" for expression in shown)]))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", PAGE.parents[1] / ".mypy_cache" / "page", "page.py"],
        cwd=tmp_path, env={**os.environ, "MYPYPATH": str(PAGE.parents[1])}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    revealed = re.findall(r'Revealed type is "(?:builtins\.)?(?:castiron[\w.]*\.)?(.*?)"', done.stdout)
    assert revealed == ["Result", "list[castiron.pipelines.text.generate.Result]", "Stream", "Bundle", "int"]


def test_the_api_has_docstrings_and_the_page_shows_each_call():
    for name in set(castiron.__all__) - {"__version__"}:
        assert getattr(castiron, name).__doc__
    session, model = "prefill step logits fork rewind", "generate stream generate_many submit read chat embed"
    calls = [f".{name}(" for name in f"{session} {model}".split()]
    for call in (*calls, "castiron.load(", "castiron.compile(", "castiron.open("):
        assert any(call in block for block in BLOCKS), call
