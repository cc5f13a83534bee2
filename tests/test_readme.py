"""Every command of the README does what it says, in the order in which a reader would type them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipelines.served import served

ROOT = Path(__file__).parent.parent
BLOCKS = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
LINES = [line for block in BLOCKS for line in block.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
SERVER, CLIENT = "castiron serve ", "curl "
COMMANDS = [line for line in LINES if line.startswith(("castiron ", "iree-run-module ")) and not line.startswith(SERVER)]


def test_the_first_screen_shows_the_two_commands():
    assert LINES[:2] == ["make compile-llm", "make test"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_readme_works(line, tmp_path_factory):
    """Run in one folder for all commands, so that what one builds the next one uses."""
    done = run(line, tmp_path_factory.getbasetemp() / "readme")
    if "--json" in line:
        assert isinstance(json.loads(done.stdout), dict)
    elif " -o " not in line:
        assert done.stdout.strip()


def run(line: str, folder: Path) -> subprocess.CompletedProcess:
    """A line of the page; fails if it does."""
    folder.mkdir(exist_ok=True)
    program, *words = shlex.split(line)
    own = [sys.executable, "-m", "castiron"]
    command = [*(own if program == "castiron" else [Path(sys.executable).parent / program]), *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # What a person would say to a chat, and no other command reads.
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, input="Hello\n")
    assert done.returncode == 0, done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_the_server_of_the_readme_answers_its_client(tmp_path_factory, tmp_path):
    """On a port of its own, because another server may have the default one."""
    (server,), (client,) = ([line for line in LINES if line.startswith(start)] for start in (SERVER, CLIENT))
    assert "http://127.0.0.1:8000/" in client
    folder = tmp_path_factory.getbasetemp() / "readme"
    place = folder / shlex.split(server)[2]
    if not place.exists():
        # This test was asked for alone.
        run(next(line for line in COMMANDS if line.startswith("castiron compile ")), folder)
    with served(place, tmp_path / "log", *shlex.split(server)[3:]) as running:
        words = [word.replace("http://127.0.0.1:8000", running.url) for word in shlex.split(client)]
        done = subprocess.run([*words, "--silent", "--fail"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_every_command_of_the_readme_is_run_here():
    assert all(line.startswith(("make ", "castiron ", "iree-run-module ", CLIENT)) for line in LINES), (
        "a line that no test runs"
    )
