"""A bundle runs elsewhere: with four packages, offline, read-only and as another user."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from packaging.utils import canonicalize_name

from castiron.emitter.abi import ROLES, State, functions
from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle
from castiron.vmfb.run.session import Session
from tests import aarch64
from tests.support import toy_text

ROOT = Path(__file__).parent.parent
NOBODY = 65534
PAGE = (ROOT / "docs" / "deploy.md").read_text()


@pytest.fixture(scope="session")
def away():
    """A folder that every user may read, unlike pytest's own folder."""
    folder = Path(tempfile.mkdtemp(prefix="castiron-away-"))
    folder.chmod(0o755)
    yield folder
    subprocess.run(["chmod", "-R", "u+w", folder], check=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def python(away) -> Path:
    """The interpreter of an environment with the runtime's packages only."""
    subprocess.run([sys.executable, "-m", "venv", away / "venv"], check=True)
    python = away / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *aarch64.pins()]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    installed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    names = {canonicalize_name(row["name"]) for row in json.loads(installed.stdout)} - {"pip", "setuptools"}
    assert names == {canonicalize_name(name) for name in aarch64.WHEELS}
    return python


@pytest.fixture(scope="session")
def copies(away, tmp_path_factory) -> dict[str, Path]:
    """Another user's read-only home, with a toy bundle in both forms and the runtime's code."""
    bundle = toy_text.write(tmp_path_factory.mktemp("deploy") / "toy")
    home = away / "home" / "other"
    shutil.copytree(bundle, home / "toy")
    pack_bundle(open_bundle(bundle), home / "toy.castiron")
    (home / "code/castiron").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "castiron" / name, home / "code/castiron")
    for package in ("pipelines", "vmfb"):
        shutil.copytree(ROOT / package, home / "code/castiron" / package, ignore=shutil.ignore_patterns("__pycache__"))
    (home / "code/castiron/emitter").mkdir()
    for name in ("__init__.py", "abi.py"):
        shutil.copy(ROOT / "emitter" / name, home / "code/castiron/emitter")
    subprocess.run(["chmod", "-R", "a-w,a+rX", home], check=True)
    return {"home": home, "directory": home / "toy", "packed": home / "toy.castiron", "here": bundle}


def offline() -> list[str]:
    """Return the words before a command that run it without network, if the system allows it."""
    unshare = ["unshare", "--net", "--map-root-user"] if os.geteuid() else ["unshare", "--net"]
    probe = shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    return unshare if probe else []


def foreign_user(python: Path) -> list[str]:
    """Return the words before a command that run it as nobody, if the system allows it.

    For root no file is read-only.
    """
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if not os.geteuid() else []
    # The interpreter may be in a folder of root that nobody may search only with a capability. The
    # command is tried with a child process, because castiron starts the interpreter again.
    search = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    again = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', '']).returncode)"
    starts = lambda words: subprocess.run([*words, python, "-c", again], cwd="/", capture_output=True).returncode == 0
    ways = (user, [*user, *search]) if user and shutil.which("setpriv") else ()
    return next((words for words in ways if starts(words)), [])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["directory", "packed"])
def test_four_packages_are_enough_offline_read_only_for_a_foreign_user(python, copies, form):
    arguments = ["run", str(copies[form]), "-p", "bcd", "-n", "6", "--ignore-eos", "--json"]
    command = [*offline(), *foreign_user(python), str(python), "-m", "castiron", *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(copies["home"]), "PYTHONPATH": str(copies["home"] / "code")}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    arguments[1] = str(copies["here"])
    here = subprocess.run([sys.executable, "-m", "castiron", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["text"] == json.loads(here.stdout)["text"] != ""


@pytest.mark.slow
def test_the_iree_run_module_command_of_the_page_works(python, copies, tmp_path):
    """The bundle and the type of its cache replace those of SmolLM2."""
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    cache = str(open_bundle(copies["here"]).manifest.states[0].of(1))
    command = command.replace("build/smollm2-135m-instruct", str(copies["directory"])).replace("30x8192x3x64xf32", cache)
    words = shlex.split(command)
    assert words[0] == "iree-run-module"
    done = subprocess.run([python.parent / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    session = Session(open_bundle(copies["here"]), 1)
    assert f"i32={session.step(1)}" in done.stdout.split()
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), session.logits(), rtol=1e-5, atol=1e-6)


def test_the_page_names_what_the_modules_have():
    """The page's table of functions has the operands and results of the ABI."""
    states = [State(name, (1, 32, 1, 4)) for name in "kv"]
    made = functions(dict(zip(ROLES, ((1,), (8,), (4,), (2,), (16,), (16,)), strict=True)))
    rows = dict(re.findall(r"^\| `(\w+?)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert {f.role for f in made} == set(ROLES)
    for function in made:
        name = re.sub(r"_\d+$", "_B" if function.role == "batch" else "_T", function.name)
        operands, results = rows[name].split(" | ")
        slots = operands.replace(" of B slots", "").split(", ")
        assert len(slots) == len(function.signature(states, 10, 6).operands) and slots[-2:] == ["k", "v"], name
        first = {"embed": ["hidden"], "encode": ["vector"]}.get(function.role, ["argmax", "logits"])
        assert results.endswith("k, v") and re.findall(r"(\w+) `", results) == first
