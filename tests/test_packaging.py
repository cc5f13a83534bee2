"""Test the locks, the imports of the packages, the wheel, the Makefile and .ci/run."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import aarch64

ROOT = Path(__file__).parent.parent
PACKAGES = ("emitter", "pipelines", "vmfb", "reference")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Name -> (lock files that are installed together, the extras that they serve)
BASE, TEST, ALL, BENCH, DOCS = (f"requirements{name}.lock" for name in ("", "-test", "-test-all", "-bench", "-docs"))
CORE_EXTRAS = ("compile", "serve", "structured", "hub", "terminal")
LOCKS = {
    "base": ((BASE,), CORE_EXTRAS),
    "test": ((BASE, TEST), (*CORE_EXTRAS, "verify", "test")),
    "test-all": ((BASE, TEST, ALL), (*CORE_EXTRAS, "verify", "test", "parquet", "ray", "test-all")),
    "bench": ((BASE, TEST, BENCH), (*CORE_EXTRAS, "verify", "test", "bench")),
    "docs": ((DOCS,), ("docs",)),
}


def lock(name: str) -> dict[str, str]:
    """Return the version of each package in a lock; fail for a line that is not an exact pin."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", "-r ")):
            pin = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
            assert pin, f"{name}: {line!r} is not an exact version"
            found[canonicalize_name(pin[1])] = pin[2]
    return found


def requirements(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return [r for r in map(Requirement, lines) if r.name != "castiron-llm"]


def imports(path: Path) -> set[tuple[str, bool]]:
    """Return (module, whether at import time) for each import; castiron.vmfb is `vmfb`."""
    found = set()

    def top(module: str) -> str:
        return module.removeprefix("castiron.").split(".")[0]

    def walk(node: ast.AST, outside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update((top(alias.name), outside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path} imports relatively; use the complete name"
                names = (f"castiron.{a.name}" for a in child.names) if child.module == "castiron" else (child.module,)
                found.update((top(name), outside) for name in names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            walk(child, outside and not inside)

    walk(ast.parse(path.read_text()), True)
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def may_measure(path: Path) -> bool:
    """Return whether the file measures or compares, and so may import test packages."""
    return path.parent == ROOT / "pipelines/evaluate" or path in (
        ROOT / "pipelines/cli/bench.py",
        ROOT / "pipelines/cli/evaluate.py",
    )


def locked(*names: str) -> dict[str, str]:
    return {name: version for file in names for name, version in lock(file).items()}


def needed(which: str) -> dict[str, Requirement]:
    """Return all requirements of a lock's extras by name; fail if the locks lack one."""
    names, extras = LOCKS[which]
    versions = locked(*names)
    waiting = requirements(*extras) if which != "docs" else [Requirement(line) for line in EXTRAS["docs"]]
    seen, found = set(), {}
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        assert name in versions, f"{name} is in no lock"
        assert requirement.specifier.contains(versions[name], prereleases=True), f"{requirement} but {versions[name]} is locked"
        key = (name, frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        found[name] = requirement
        try:
            children = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            assert which in ("bench", "docs"), f"{name} is not installed"
            continue
        for child in map(Requirement, children):
            environments = [{**default_environment(), "extra": extra} for extra in (*requirement.extras, "")]
            # torch's CPU build does not need its GPU packages.
            wanted = child.marker is None or any(child.marker.evaluate(environment) for environment in environments)
            if wanted and not canonicalize_name(child.name).startswith(("nvidia-", "cuda-", "triton")):
                waiting.append(child)
    return found


@pytest.mark.parametrize("which", LOCKS)
def test_the_lock_has_all_dependencies(which):
    assert needed(which)


def test_a_lock_has_no_packages_that_its_extras_do_not_need():
    """setuptools installs castiron itself."""
    assert set(lock(BASE)) == {*needed("base"), "setuptools"}
    assert set(lock(BASE)) | set(lock(TEST)) == {*needed("test"), "setuptools"}
    assert not set(lock(TEST)) & set(lock(ALL)) and not set(lock(BASE)) & (set(lock(TEST)) | set(lock(ALL)))


def test_the_first_lock_has_what_compile_run_and_serve_import():
    """Imports inside functions count. Files that measure or compare need the second lock."""
    modules = set(
        "iree numpy tokenizers jinja2 llguidance gguf safetensors starlette uvicorn pydantic pydantic_core huggingface_hub "
        "fastapi httptools prometheus_client prompt_toolkit shtab".split()
    )
    allowed = set(sys.stdlib_module_names) | modules | {"castiron", "emitter", "vmfb", "pipelines"}
    for path in (path for package in PACKAGES for path in sources(package)):
        names = {name for name, _ in imports(path)}
        assert "tests" not in names, path
        if path.relative_to(ROOT).parts[0] != "reference" and path.name != "parquet.py" and not may_measure(path):
            more = {"ray", "pyarrow", "fsspec"} if path.parent.name == "cluster" else set()
            assert names <= allowed | more, path


def test_exact_versions_in_the_project_and_in_the_lock_are_the_same():
    versions = locked(BASE, TEST, ALL, BENCH, DOCS)
    for requirement in requirements(*EXTRAS):
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        if exact and canonicalize_name(requirement.name) in versions:
            assert exact == [versions[canonicalize_name(requirement.name)]]
    assert versions["iree-base-compiler"] == versions["iree-base-runtime"]
    # All may be installed into one environment.
    assert all(version == versions[name] for file in (BASE, TEST, ALL, BENCH, DOCS) for name, version in lock(file).items())


def test_module_names_of_pipelines_are_unique():
    """Files of the command line are named after their commands, those of APIs after their resources."""
    apart = ("cli", "openai", "anthropic", "ollama")
    names = [path.name for path in sources("pipelines") if path.parent.name not in apart and path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))


def test_the_import_contracts_find_an_import_that_is_only_for_types(tree):
    path = tree / "pipelines/checkpoints/gguf/gguf_file.py"
    original = path.read_text()
    path.write_text(
        f"{original}\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import castiron.pipelines.engine.request\n"
    )
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    try:
        done = run_in(tree, sys.executable, "-c", lint)
    finally:
        path.write_text(original)
    printed = done.stdout.replace("\n", "")
    assert done.returncode == 1 and "gguf_file -> castiron.pipelines.engine.request" in printed, printed + done.stderr


LAZY = {"grammar_compiler.py": {("llguidance", True)}, "main.py": {("shtab", False)}, "chat.py": {("prompt_toolkit", False)}}


def test_the_emitter_and_running_a_bundle_import_no_packages_of_extras():
    for path in sources("emitter"):
        assert {name for name, _ in imports(path)} <= {*sys.stdlib_module_names, "numpy", "emitter"}, path
    own = {"emitter", "vmfb", "pipelines", "castiron"}
    allowed = set(sys.stdlib_module_names) | own | {"numpy", "iree", "tokenizers", "jinja2"}
    files = [
        *sources("vmfb"),
        *sources("pipelines/engine"),
        *sources("pipelines/text"),
        *(ROOT / "pipelines").glob("*.py"),
        *(ROOT / f"pipelines/cli/{name}.py" for name in ("main", "options", "run", "chat")),
    ]
    for path in files:
        # Structured output needs an extra, and reports it; line editing is plain without its own.
        extra = LAZY.get(path.name, set())
        assert {name for name, _ in imports(path) - extra} <= allowed, path


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Copy the files that are packaged."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("castiron", *PACKAGES, "tests"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), str(tree)]
    subprocess.run(command, check=True, timeout=300)
    (built,) = out.glob("castiron_llm-*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_the_wheel_holds_every_source_and_data_file_and_no_test(tree, wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {f"castiron/{path.relative_to(tree)}" for package in PACKAGES for path in (tree / package).rglob("*.py")}
    data = {f"castiron/{path.relative_to(tree)}" for path in (tree / "pipelines").rglob("*.*") if path.suffix != ".pyc"}
    assert sources <= names and data <= names and {"castiron/py.typed", "castiron/ray.py"} <= names
    assert {"castiron/pipelines/evaluate/verify_prompts.jsonl", "castiron/pipelines/server/page/chat.html"} <= data
    # One name in site-packages: a user's own `pipelines` or `reference` must not collide with castiron's.
    assert {name.split("/")[0] for name in names} == {"castiron"}


def test_the_wheel_leaves_nothing_among_the_bundles(tree, wheel):
    """Bundles are in build/, where `castiron list` looks; git ignores what is left elsewhere."""
    assert not (tree / "build").exists()
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    left = {path.name for path in tree.iterdir()} - {path.name for path in ROOT.iterdir()}
    assert left <= {".wheel", "castiron_llm.egg-info"} and {".wheel/", "*.egg-info/"} <= set(ignored)


def test_the_wheel_has_the_command_and_the_licence(wheel):
    texts = {name.split("/", 1)[1]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "castiron = castiron.pipelines.cli.main:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Version 2.0, January 2004" in texts["licenses/LICENSE"]


def test_a_users_packages_may_have_the_names_of_castirons_folders(tmp_path):
    """The user's packages come first on Python's path, and are in the current directory."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is a user's own')\n")
    code = "import sys; from castiron.pipelines.cli.main import main; sys.exit(main(['list']))"
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    for argv in (["-m", "castiron", "list"], ["-c", code]):
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "smollm2" in done.stdout, done.stderr


def test_castiron_is_imported_beside_a_clone_of_that_name(tmp_path):
    """The folder of a clone would be a namespace package, which an import hook finds too late."""
    (tmp_path / "castiron" / "emitter").mkdir(parents=True)
    command = ["env", "-u", "PYTHONPATH", sys.executable, "-c", "import castiron; print(castiron.load)"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.startswith("<function load"), done.stderr


def run_in(directory: Path, *command: str) -> subprocess.CompletedProcess:
    # Variables of a make that runs these tests must not reach this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST_ARGS"))}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture
def installed_tree(tmp_path):
    """Copy the Makefile and the locks; programs in .venv only record their arguments."""
    for name in ("Makefile", "pyproject.toml", BASE, TEST, ALL, BENCH, DOCS):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "castiron", "lint-imports"):
        program = tmp_path / ".venv/bin" / name
        program.write_text(f'#!/bin/sh\nfor word in {name} "$@"; do printf "%s|" "$word"; done >> calls\necho >> calls\n')
        program.chmod(0o755)
    return tmp_path


PYTEST = ["python", "-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart", "0"]
PIP_INSTALL = ["-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", "install", "-r"]


def calls(directory: Path) -> list[list[str]]:
    text = (directory / "calls").read_text() if (directory / "calls").exists() else ""
    (directory / "calls").unlink(missing_ok=True)
    return [line.split("|")[:-1] for line in text.splitlines()]


def installs(found: list[list[str]]) -> list[str]:
    """Return the last argument of each call of pip."""
    return [call[-1] for call in found if call[0] == "python" and "install" in call]


def test_make_compile_llm_installs_the_first_lock_and_prints_its_size(installed_tree):
    done = run_in(installed_tree, "make", "compile-llm")
    assert done.returncode == 0, done.stderr
    assert installs(calls(installed_tree)) == [BASE, "."]
    assert re.search(r"\d+ MB to fetch, \d+ MB on disk", done.stderr)
    done = run_in(installed_tree, "make", "test")
    first, *rest = installs(calls(installed_tree))
    assert first.startswith("torch==") and rest == [TEST] and re.search(r"\d GB on disk", done.stderr)
    run_in(installed_tree, "make", "compile-llm")
    assert installs(calls(installed_tree)) == []


def test_make_installs_a_lock_when_it_changes(installed_tree):
    assert run_in(installed_tree, "make", "test").returncode == 0
    first = calls(installed_tree)
    assert installs(first)[:2] == [BASE, "."] and installs(first)[-1] == TEST
    assert first[-1] == [*PYTEST, "--tier", "quick"]
    assert run_in(installed_tree, "make", "test").returncode == 0
    assert calls(installed_tree) == [[*PYTEST, "--tier", "quick"]]
    assert run_in(installed_tree, "make", "test-family", "FAMILY=gemma").returncode == 0
    (family,) = calls(installed_tree)
    assert family[: len(PYTEST) + 2] == [*PYTEST, "-k", "gemma"] and "--tier" not in family
    assert run_in(installed_tree, "make", "test-all", "PYTEST_ARGS=-k a").returncode == 0
    llvmpipe = ["python", "-m", "tests.mesa", "build/mesa"]
    assert calls(installed_tree)[-3:] == [["python", *PIP_INSTALL, ALL], llvmpipe, [*PYTEST, "-k", "a"]]
    assert run_in(installed_tree, "make", "test-vulkan").returncode == 0
    assert calls(installed_tree)[0] == llvmpipe
    assert run_in(installed_tree, "make", "test-models").returncode == 0
    assert calls(installed_tree) == [
        ["python", "-m", "pytest", "-v", "-o", "tmp_path_retention_policy=none", "--tier", "models", "tests/models"]
    ]
    with open(installed_tree / BASE, "a") as file:
        file.write("# changed\n")
    for _ in range(2):
        run_in(installed_tree, "make", "test")
    assert len(calls(installed_tree)) == len(first) + 1
    # Going back to the first lock installs it again.
    shutil.copy(ROOT / BASE, installed_tree)
    run_in(installed_tree, "make", "test")
    assert len(calls(installed_tree)) == len(first)


def test_make_test_aarch64_fails_where_it_cannot_be_set_up(installed_tree, monkeypatch):
    assert run_in(installed_tree, "make", "test-aarch64").returncode == 0
    setup, tests = calls(installed_tree)[-2:]
    assert setup == ["python", "-m", "tests.aarch64", "build/aarch64"] and tests[-1] == "tests/test_aarch64.py"
    program = installed_tree / ".venv/bin/python"
    program.write_text(program.read_text() + '[ "$2" != tests.aarch64 ]\n')
    assert run_in(installed_tree, "make", "test-aarch64").returncode != 0
    assert calls(installed_tree) == [setup]
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="needs qemu-user-static and mmdebstrap .*: sudo apt-get install .* qemu-user-static"):
        aarch64.install_programs()


@pytest.mark.parametrize(
    ("options", "compiled", "asked"),
    [
        ([], ["smollm2-135m-instruct", "-o", "build/smollm2-135m-instruct", "--weights", "native"], ["-p"]),
        (["MODEL=/a b/It's.Q4_1.gguf", "CONTEXT=512", "WEIGHTS=f32"],
         ["/a b/It's.Q4_1.gguf", "-o", "build/It's.Q4_1", "--weights", "f32", "--context", "512"], ["-p"]),
        (["MODEL=models/Llama-3.2/", "PROMPT=Say \"$$HOME\" & 'x'"],
         ["models/Llama-3.2/", "-o", "build/Llama-3.2", "--weights", "native"], ["-p", "Say \"$HOME\" & 'x'"]),
        (["TOKENS=1,2"], ["smollm2-135m-instruct", "-o", "build/smollm2-135m-instruct", "--weights", "native"],
         ["--tokens", "1,2"]),
    ],
)  # fmt: skip
def test_make_compile_llm_passes_its_variables_to_castiron(installed_tree, options, compiled, asked):
    done = run_in(installed_tree, "make", "compile-llm", *options)
    assert done.returncode == 0, done.stderr
    compiling, running = calls(installed_tree)[-2:]
    assert compiling == ["castiron", "compile", *compiled]
    assert running[:3] == ["castiron", "run", compiled[2]] and running[3 : 3 + len(asked)] == asked


def test_a_failing_compile_is_not_followed_by_a_run(installed_tree):
    program = installed_tree / ".venv/bin/castiron"
    program.write_text('#!/bin/sh\necho "$1" >> calls\nexit 1\n')
    assert run_in(installed_tree, "make", "compile-llm").returncode != 0
    assert [call for call in (installed_tree / "calls").read_text().splitlines() if "|" not in call] == ["compile"]


def test_make_coverage_prints_each_package_and_returns_the_status(installed_tree):
    done = run_in(installed_tree, "make", "coverage")
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == sorted(PACKAGES)
    assert ["python", "-m", "coverage", "run", *PYTEST[1:]] in calls(installed_tree)
    settings = tomllib.loads((installed_tree / "pyproject.toml").read_text())["tool"]["coverage"]["run"]
    assert sorted(settings["source"]) == sorted(PACKAGES)
    python = installed_tree / ".venv/bin/python"
    python.write_text(python.read_text() + 'case "$*" in *pytest*) exit 3;; esac\n')
    assert run_in(installed_tree, "make", "coverage").returncode != 0


def test_ci_runs_every_test_and_returns_the_status(installed_tree):
    shutil.copytree(ROOT / ".ci", installed_tree / ".ci")
    python = installed_tree / ".venv/bin/python"
    assert run_in(installed_tree, "bash", ".ci/run").returncode == 0
    tests = [call[-2:] for call in calls(installed_tree) if call[: len(PYTEST)] == PYTEST]
    assert tests == [["--tier", "quick"], ["--tier", "full"]]
    python.write_text(python.read_text() + "exit 3\n")
    assert run_in(installed_tree, "bash", ".ci/run").returncode != 0
