"""The guide to the kernels: what it shows is what the code does, and the change of layout that it makes is right."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from castiron.pipelines import cli
from castiron.reference.tiny import tiny_model
from castiron.vmfb.cache import cache_folder

ROOT = Path(__file__).parent.parent.parent
GUIDE = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
MODEL = "smollm2-135m-instruct"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```$", GUIDE, re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(text) for _, text in found]


def test_the_facts_are_those_of_the_code():
    test = doctest.DocTestParser().get_doctest("\n".join(blocks("python")), {}, "docs/kernels.md", None, 0)
    assert len(test.examples) > 10
    assert doctest.DocTestRunner().run(test).failed == 0


def test_the_mlir_is_what_is_printed(capsys):
    """In this order, and without a gap but where the guide says `...`."""
    (shown,) = blocks("mlir")
    (command,) = re.findall(r"`castiron (emit .*--isa avx2.*?)` prints", GUIDE)
    assert cli.main(shlex.split(command)) == 0
    printed = "\n".join(line.strip() for line in capsys.readouterr().out.splitlines())
    constants, *pieces = [piece.strip() for piece in shown.split("...\n")]
    assert all(f"{line}\n" in printed for line in constants.splitlines())
    at = 0
    for piece in filter(None, pieces):
        at = printed.index(f"{piece}\n", at)


def test_what_the_guide_names_is_there():
    named = re.findall(r"`((?:emitter|pipelines|tests)/[\w./]+)`", GUIDE)
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists(), path
    for room, cell in re.findall(r"^\| `(emitter/[\w/]+)` \| (.*) \|$", GUIDE, re.MULTILINE):
        for file in re.findall(r"`(\w+\.py)`", cell):
            assert (ROOT / room / file).is_file(), f"{room}/{file}"
    sources = "".join(path.read_text() for path in (ROOT / "emitter").rglob("*.py"))
    for name in re.findall(r"`(?:[A-Z]\w+\.)?(_?[A-Za-z]\w+)`", GUIDE):
        assert re.search(rf"\b{name}\b", sources), name


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_guide_work(tmp_path):
    """All in one folder, one after another, with a small model by the name of the one that the guide has."""
    model = tiny_model("llama", tmp_path / "models" / MODEL, num_hidden_layers=4)
    lines = [line for block in blocks("sh") for line in block.replace("\\\n", " ").splitlines()]
    assert sum(line.startswith("castiron ") for line in lines) >= 6
    # What tune finds is this test's own; what iree-compile makes is for all.
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "compile").symlink_to(cache_folder("compile"))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CASTIRON_CACHE": str(tmp_path / "cache"),
    }
    for line in lines:
        command = re.sub(r"^castiron ", f"{sys.executable} -m castiron ", line)
        command = re.sub(rf"(?<!/){MODEL}", str(model), command)
        done = subprocess.run(command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{line}\n{done.stderr[-2000:]}"
        assert done.stdout.strip() or " -o " in line, line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_change_of_the_guide_is_right_and_the_golden_text_tells(tmp_path):
    """Made in a copy: the tests that the guide names pass, and those of the text see it."""
    for folder in ("castiron", "emitter", "pipelines", "vmfb", "reference", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (change,) = blocks("diff")
    for part in change.split("--- ")[1:]:
        path, *lines = part.splitlines()
        text = (tmp_path / path).read_text()
        for old, new in zip(lines[::2], lines[1::2], strict=True):
            assert old[0] == "-" and new[0] == "+" and text.count(f"{old[1:]}\n") == 1, old
            text = text.replace(f"{old[1:]}\n", f"{new[1:]}\n")
        (tmp_path / path).write_text(text)

    def status(*words: str) -> int:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True).returncode

    assert status("tests/emitter/test_packing.py") == 0
    assert status("tests/emitter/test_gemv.py", "-k", "host_matches") == 0
    assert status("tests/emitter/test_golden.py", "-k", "golden_one and gemv") == 1
