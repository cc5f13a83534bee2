"""Run every command of the README in order."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.pipelines.cli.main import COMMANDS as COMMANDS_OF_CASTIRON
from tests.support.served import served

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
SERVER, CLIENT = "castiron serve ", "curl "
COMMANDS = [line for line in LINES if line.startswith(("castiron ", "iree-run-module ")) and not line.startswith(SERVER)]


def test_the_page_is_short_and_its_first_screen_shows_three_commands():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150 and max(len(line) for line in lines if not line.startswith(("|", "checkpoint "))) <= 110
    assert [line.split(" ")[:2] for line in (LINES[0], *LINES[2:4])] == [
        ["make", "compile-llm"],
        ["castiron", "run"],
        ["castiron", "serve"],
    ]
    assert "castiron serve" in "\n".join(lines[:30])


def test_the_page_of_commands_describes_every_command():
    page = (ROOT / "docs" / "commands.md").read_text()
    assert set(re.findall(r"^\| `(\w+)", page, re.MULTILINE)) == set(COMMANDS_OF_CASTIRON)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_works(line, tmp_path_factory):
    """All commands run in one folder, because some use the results of earlier ones."""
    done = run(line, tmp_path_factory.getbasetemp() / "readme")
    if "--json" in line:
        assert isinstance(json.loads(done.stdout), dict)
    elif " -o " not in line:
        assert done.stdout.strip()


def run(line: str, folder: Path) -> subprocess.CompletedProcess:
    """Run a line of the page; fail if its exit status is not 0."""
    folder.mkdir(exist_ok=True)
    program, *words = shlex.split(line)
    own = [sys.executable, "-m", "castiron"]
    command = [*(own if program == "castiron" else [Path(sys.executable).parent / program]), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Only castiron chat reads stdin.
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, input="Hello\n")
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_the_server_of_the_readme_answers_its_client(tmp_path_factory, tmp_path):
    """The server gets a free port, because the default one may be in use."""
    (server,), (client,) = ([line for line in LINES if line.startswith(start)] for start in (SERVER, CLIENT))
    assert "http://127.0.0.1:8000/" in client
    folder = tmp_path_factory.getbasetemp() / "readme"
    location = folder / shlex.split(server)[2]
    if not location.exists():
        # This test runs by itself.
        run(next(line for line in COMMANDS if line.startswith("castiron compile ")), folder)
    with served(location, tmp_path / "log", *shlex.split(server)[3:]) as running:
        words = [word.replace("http://127.0.0.1:8000", running.url) for word in shlex.split(client)]
        done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_environment_that_make_sets_up_has_castiron():
    activate = LINES[1].replace(".venv", sys.prefix)
    found = subprocess.run(["sh", "-c", f"{activate} && command -v castiron"], capture_output=True, text=True)
    assert found.stdout.strip() == f"{sys.prefix}/bin/castiron"


def test_every_command_of_the_readme_is_run_here():
    run = [line for line in LINES if line != ". .venv/bin/activate"]
    assert len(run) == len(LINES) - 1
    assert all(line.startswith(("make ", "castiron ", "iree-run-module ", CLIENT)) for line in run), "a line that no test runs"
