"""A bundle runs elsewhere: with four packages, offline, read-only, as another user; and without castiron at all."""

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

from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.session import Session
from tests.pipelines import toy_text

ROOT = Path(__file__).parent.parent
# What a bundle needs, and what the runtime and jinja2 cannot be imported without.
PACKAGES = ("iree-base-runtime", "numpy", "tokenizers", "jinja2", "ml-dtypes", "MarkupSafe")
NOBODY = 65534
PAGE = (ROOT / "docs" / "deploy.md").read_text()


@pytest.fixture(scope="session")
def away():
    """A place that every user may read, which pytest's own is not."""
    place = Path(tempfile.mkdtemp(prefix="castiron-away-"))
    place.chmod(0o755)
    yield place
    subprocess.run(["chmod", "-R", "u+w", place], check=True)
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def python(away) -> Path:
    """The interpreter of an environment with the runtime's packages and nothing else."""
    lock = dict(re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE))
    versions = {canonicalize_name(name): version for name, version in lock.items()}
    subprocess.run([sys.executable, "-m", "venv", away / "venv"], check=True)
    pins = [f"{name}=={versions[canonicalize_name(name)]}" for name in PACKAGES]
    python = away / "venv/bin/python"
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *pins]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    installed = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    names = {canonicalize_name(row["name"]) for row in json.loads(installed.stdout)} - {"pip", "setuptools"}
    assert names == {canonicalize_name(name) for name in PACKAGES}
    return python


@pytest.fixture(scope="session")
def copies(away, tmp_path_factory) -> dict[str, Path]:
    """A toy bundle, as a directory and packed, and castiron's runtime half, in a home of someone else's, all read-only."""
    bundle = toy_text.write(tmp_path_factory.mktemp("deploy") / "toy")
    home = away / "home" / "other"
    shutil.copytree(bundle, home / "toy")
    pack_bundle(open_bundle(bundle), home / "toy.castiron")
    (home / "code/castiron").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        shutil.copy(ROOT / "castiron" / name, home / "code/castiron")
    for package in ("pipelines", "vmfb"):
        shutil.copytree(ROOT / package, home / "code/castiron" / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["chmod", "-R", "a-w,a+rX", home], check=True)
    return {"home": home, "directory": home / "toy", "packed": home / "toy.castiron", "here": bundle}


def offline() -> list[str]:
    """What a command is put behind to have no network, where the system lets us."""
    unshare = ["unshare", "--net", "--map-root-user"] if os.geteuid() else ["unshare", "--net"]
    probe = shutil.which("unshare") and subprocess.run([*unshare, "true"], capture_output=True).returncode == 0
    return unshare if probe else []


def another_user(python: Path) -> list[str]:
    """What a command is put behind to be nobody's, where the system lets us: for root no file is read-only."""
    user = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"] if not os.geteuid() else []
    # The interpreter may be in root's own folder, which only some systems let nobody search; and castiron starts it again for
    # what it does not trust.
    search = ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
    again = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', '']).returncode)"
    starts = lambda words: subprocess.run([*words, python, "-c", again], cwd="/", capture_output=True).returncode == 0
    ways = (user, [*user, *search]) if user and shutil.which("setpriv") else ()
    return next((words for words in ways if starts(words)), [])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["directory", "packed"])
def test_four_packages_are_enough_offline_read_only_for_another_user(python, copies, form):
    arguments = ["run", str(copies[form]), "-p", "bcd", "-n", "6", "--ignore-eos", "--json"]
    command = [*offline(), *another_user(python), str(python), "-m", "castiron", *arguments]
    environment = {"PATH": os.environ["PATH"], "HOME": str(copies["home"]), "PYTHONPATH": str(copies["home"] / "code")}
    done = subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    arguments[1] = str(copies["here"])
    here = subprocess.run([sys.executable, "-m", "castiron", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["text"] == json.loads(here.stdout)["text"] != ""


@pytest.mark.slow
def test_iree_run_module_drives_a_bundle_as_the_page_says(python, copies, tmp_path):
    """The page's own command, with another bundle and its cache's type in the place of SmolLM2's."""
    (command,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    cache = open_bundle(copies["here"]).manifest.states[0].type()
    command = command.replace("build/smollm2-135m-instruct", str(copies["directory"])).replace("30x8192x3x64xf32", cache)
    words = shlex.split(command)
    assert words[0] == "iree-run-module"
    done = subprocess.run([python.parent / words[0], *words[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    session = Session(open_bundle(copies["here"]), 1)
    assert f"i32={session.step(1)}" in done.stdout.split()
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), session.logits(), rtol=1e-5, atol=1e-6)


def test_the_page_names_what_the_modules_have():
    """The table of functions against the manifest's own, and the packages against the project's."""
    from castiron.vmfb.manifest import ROLES, entry_points
    from castiron.vmfb.states import State

    states = [State(name, (1, 32, 1, 4), "f32", "positional") for name in "kv"]
    made = entry_points(states, 10, dict(zip(ROLES, ((1,), (8,), (4,), (2,), (16,), (16,)), strict=True)), 6)
    rows = dict(re.findall(r"^\| `(\w+?)` \| (.*) \|$", PAGE, re.MULTILINE))
    assert {f.role for f in made} == set(ROLES)
    for function in made:
        name = re.sub(r"_\d+$", "_B" if function.role == "batch" else "_T", function.name)
        operands, results = rows[name].split(" | ")
        slots = operands.replace(" of B slots", "").split(", ")
        assert len(slots) == len(function.inputs) and slots[-2:] == ["k", "v"], name
        first = {"embed": ["hidden"], "encode": ["vector"]}.get(function.role, ["argmax", "logits"])
        assert results.endswith("k, v") and re.findall(r"(\w+) `", results) == first
