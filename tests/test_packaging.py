"""The project as it is handed over: one lock, packages that import each other one way, a wheel that is whole."""

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
# What each lock holds, with those before it: what make compile-llm, make test and make bench install, and make docs alone.
BASE, TEST, BENCH, DOCS = (f"requirements{name}.lock" for name in ("", "-test", "-bench", "-docs"))
LOCKS = {
    "base": ((BASE,), ("compile", "serve", "structured", "hub")),
    "tests": ((BASE, TEST), ("compile", "serve", "structured", "hub", "parquet", "ray", "sign", "verify", "test")),
    "bench": (
        (BASE, TEST, BENCH),
        ("compile", "serve", "structured", "hub", "parquet", "ray", "sign", "verify", "test", "bench"),
    ),
    "docs": ((DOCS,), ("docs",)),
}


def lock(name: str) -> dict[str, str]:
    """Version by canonical name; fails for a line that is anything but an exact pin."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if line and not line.startswith(("#", "-r ")):
            pin = re.fullmatch(r"([A-Za-z0-9._-]+)==([0-9][A-Za-z0-9.]*)", line)
            assert pin, f"{name}: {line!r} is not an exact version"
            found[canonicalize_name(pin[1])] = pin[2]
    return found


def requirements(*extras: str) -> list[Requirement]:
    lines = [*PROJECT["dependencies"], *(line for extra in extras for line in EXTRAS[extra])]
    return [r for r in map(Requirement, lines) if r.name != "castiron"]


def imports(path: Path) -> set[tuple[str, bool]]:
    """Top-level modules that a file imports, castiron's packages by their own names, and whether at import time."""
    found = set()

    def top(module: str) -> str:
        return module.removeprefix("castiron.").split(".")[0]

    def walk(node: ast.AST, outside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found.update((top(alias.name), outside) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{path} imports relatively; the project's imports say the whole name"
                names = (f"castiron.{a.name}" for a in child.names) if child.module == "castiron" else (child.module,)
                found.update((top(name), outside) for name in names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            walk(child, outside and not inside)

    walk(ast.parse(path.read_text()), True)
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def locked(*names: str) -> dict[str, str]:
    return {name: version for file in names for name, version in lock(file).items()}


def needed(which: str) -> dict[str, Requirement]:
    """By name all that the extras of a lock ask for, and what that asks for; fails where the lock has it not, or another."""
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
            # What torch adds for graphics cards is not part of its CPU build.
            wanted = child.marker is None or any(child.marker.evaluate(environment) for environment in environments)
            if wanted and not canonicalize_name(child.name).startswith(("nvidia-", "cuda-", "triton")):
                waiting.append(child)
    return found


@pytest.mark.parametrize("which", LOCKS)
def test_the_lock_holds_what_the_project_asks_for_and_all_that_this_needs(which):
    assert needed(which)


def test_what_compiles_and_runs_is_installed_without_what_only_tests_need():
    """The first lock has nothing that compile and serve do not ask for; setuptools installs castiron itself."""
    assert set(lock(BASE)) == {*needed("base"), "setuptools"}
    assert not set(lock(BASE)) & set(lock(TEST)) and {"torch", "jaxlib", "scipy", "matplotlib"} <= set(lock(TEST))


def test_what_compiles_runs_and_serves_imports_what_the_first_lock_has():
    """At import time or later; tests, reference and the commands that measure or compare have the second lock."""
    others = ("verify.py", "evaluate.py", "bench.py", "bench_worker.py", "diff.py", "chart.py", "signature.py", "parquet.py")
    modules = set(
        "iree numpy tokenizers jinja2 llguidance gguf safetensors starlette uvicorn h11 pydantic huggingface_hub".split()
    )
    allowed = set(sys.stdlib_module_names) | modules | {"castiron", "emitter", "vmfb", "pipelines"}
    for path in (path for package in ("emitter", "vmfb", "pipelines") for path in sources(package)):
        if path.name not in others:
            more = {"ray", "pyarrow", "fsspec"} if path.parent.name == "cluster" else set()
            assert {name for name, _ in imports(path)} <= allowed | more, path


def test_exact_versions_in_the_project_and_in_the_lock_are_the_same():
    versions = locked(BASE, TEST, BENCH, DOCS)
    for requirement in requirements(*EXTRAS):
        exact = [s.version for s in requirement.specifier if s.operator == "=="]
        if exact and canonicalize_name(requirement.name) in versions:
            assert exact == [versions[canonicalize_name(requirement.name)]]
    assert versions["iree-base-compiler"] == versions["iree-base-runtime"]
    # All may be installed into one environment.
    assert all(version == versions[name] for file in (BASE, TEST, BENCH, DOCS) for name, version in lock(file).items())


def import_graph(root: Path, packages: tuple[str, ...]) -> dict[str, set[str]]:
    """Modules below `root` and those of them that each imports, anywhere in its file, by names such as `emitter.ir`."""
    files = {path.relative_to(root).with_suffix(""): path for package in packages for path in (root / package).rglob("*.py")}
    modules = {".".join(name.parts).removesuffix(".__init__"): path for name, path in files.items()}

    def imported(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if not isinstance(node, ast.ImportFrom):
            return []
        # `from package import name` imports the module of that name, or else the package.
        names = {f"{node.module}.{alias.name}": node.module for alias in node.names}
        return [name if name.removeprefix("castiron.") in modules else module for name, module in names.items()]

    return {
        name: {found.removeprefix("castiron.") for node in ast.walk(ast.parse(path.read_text())) for found in imported(node)}
        & modules.keys() - {name}
        for name, path in modules.items()
    }


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """Sets of modules of which each imports every other, if only by way of others."""

    def reached(start: str) -> set[str]:
        found, waiting = set(), [start]
        while waiting:
            new = graph[waiting.pop()] - found
            found |= new
            waiting += new
        return found

    reach = {name: reached(name) for name in graph}
    return {frozenset(other for other in reach[name] if name in reach[other]) for name in graph if name in reach[name]}


def test_no_modules_import_each_other_in_a_circle():
    assert not circles(import_graph(ROOT, PACKAGES))


@pytest.mark.parametrize(
    "back",
    [
        "from castiron.toy import a\n",
        "from castiron.toy.a import A\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from castiron.toy.a import A\n",
        "def f():\n    import castiron.toy.a\n",
    ],
    ids=["module", "name", "types", "function"],
)
def test_a_circle_is_found_wherever_it_hides(tmp_path, back):
    (tmp_path / "toy").mkdir()
    sources = {"__init__": "", "a": "from castiron.toy import b\n", "b": "from castiron.toy.c import C\n", "c": back, "d": ""}
    for name, source in sources.items():
        (tmp_path / "toy" / f"{name}.py").write_text(source)
    assert circles(import_graph(tmp_path, ("toy",))) == {frozenset({"toy.a", "toy.b", "toy.c"})}


def test_the_emitter_needs_the_standard_library_and_numpy_only():
    allowed = set(sys.stdlib_module_names) | {"numpy", "emitter"}
    for path in sources("emitter"):
        assert {name for name, _ in imports(path)} <= allowed, path


def test_packages_import_each_other_one_way():
    """checkpoint -> emitter -> vmfb -> pipelines; reference is verify's, bench's and diff's, when they run."""
    may = {"emitter": set(), "vmfb": set(), "pipelines": {"emitter", "vmfb"}, "reference": {"emitter", "vmfb", "pipelines"}}
    for package in PACKAGES:
        for path in sources(package):
            others = {name for name, _ in imports(path)} & set(PACKAGES) - {package}
            if path.name in ("verify.py", "bench.py", "bench_worker.py", "diff.py"):
                others -= {"reference"}
            assert others <= may[package], f"{path} imports {', '.join(others - may[package])}"
            assert "tests" not in {name for name, _ in imports(path)}, path


def test_generation_knows_no_http():
    """serve imports generation, and generation neither serve nor what serve is made of."""
    for path in sources("pipelines/generation"):
        modules = {node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)}
        assert not {name for name in modules if name.startswith("castiron.pipelines.serve")}, path
        assert not {name for name, _ in imports(path)} & {"http", "starlette", "uvicorn", "pydantic"}, path


def test_a_runtime_environment_is_enough_to_run():
    """Of third-party packages, what runs a bundle imports those that the project depends on without extras."""
    allowed = set(sys.stdlib_module_names) | {"numpy", "iree", "tokenizers", "jinja2", "vmfb", "pipelines", "castiron"}
    commands = ("options", "run", "chat", "console", "lines", "settings", "wrapping")
    others = ("cli", "progress", "errors", "installing", "sizes", "measuring/memory")
    names = (*others, *(f"commands/{name}" for name in commands))
    files = [*sources("vmfb"), *sources("pipelines/generation"), *(ROOT / "pipelines" / f"{name}.py" for name in names)]
    for path in files:
        # Structured output and signatures need an extra, and say so when they are asked for.
        extra = {"grammar.py": {("llguidance", False)}, "signature.py": {("cryptography", False)}}.get(path.name, set())
        assert {name for name, _ in imports(path) - extra} <= allowed, path


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of what is packaged."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("castiron", *PACKAGES, "tests"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, tree)
    return tree


@pytest.fixture(scope="module")
def wheel(tree, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(out), str(tree)]
    subprocess.run(command, check=True, timeout=300)
    (built,) = out.glob("castiron-*.whl")
    with zipfile.ZipFile(built) as archive:
        yield archive


def test_the_wheel_holds_every_source_and_data_file_and_no_test(tree, wheel):
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {f"castiron/{path.relative_to(tree)}" for package in PACKAGES for path in (tree / package).rglob("*.py")}
    assert sources <= names
    assert {
        "castiron/py.typed",
        "castiron/ray.py",
        "castiron/pipelines/checking/verify_prompts.jsonl",
        "castiron/pipelines/checking/evaluate_text.txt",
        "castiron/pipelines/serve/page/chat.html",
        "castiron/pipelines/serve/page/chat.css",
        "castiron/pipelines/serve/page/chat.js",
        "castiron/pipelines/serve/page/icon.svg",
    } <= names
    # One name in site-packages, so that nobody's own `pipelines` or `reference` is in the way of castiron's.
    assert {name.split("/")[0] for name in names} == {"castiron"}


def test_the_wheel_has_the_command_and_the_licence(wheel):
    texts = {name.split("/", 1)[1]: wheel.read(name).decode() for name in wheel.namelist() if ".dist-info/" in name}
    assert "castiron = castiron.pipelines.cli:main" in texts["entry_points.txt"]
    assert "License-Expression: Apache-2.0" in texts["METADATA"]
    assert "Version 2.0, January 2004" in texts["licenses/LICENSE"]


def test_folders_of_a_user_are_not_in_the_way(tmp_path):
    """A project of one's own with the names of castiron's folders, first on Python's path and the current directory."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError('this is a user's own')\n")
    code = "import sys; from castiron.pipelines.cli import main; sys.exit(main(['inspect']))"
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    for argv in (["-m", "castiron", "inspect"], ["-c", code]):
        environment = {**os.environ, "PYTHONPATH": paths}
        done = subprocess.run(
            [sys.executable, *argv], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0 and "smollm2" in done.stdout, done.stderr


def run_in(directory: Path, *command: str) -> subprocess.CompletedProcess:
    # What the make that runs the tests was told is not for this one.
    told = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS", "PYTEST_ARGS"))}
    return subprocess.run(command, cwd=directory, env=told, capture_output=True, text=True, timeout=300, check=False)


def make(*argv: str, directory: Path) -> subprocess.CompletedProcess:
    return run_in(directory, "make", *argv)


@pytest.fixture
def installed_tree(tmp_path):
    """The Makefile and its locks, with programs in .venv that write down how they are called."""
    for name in ("Makefile", "pyproject.toml", BASE, TEST, BENCH, DOCS):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for name in ("python", "castiron"):
        program = tmp_path / ".venv/bin" / name
        program.write_text(f'#!/bin/sh\nfor word in {name} "$@"; do printf "%s|" "$word"; done >> calls\necho >> calls\n')
        program.chmod(0o755)
    return tmp_path


def calls(directory: Path) -> list[list[str]]:
    text = (directory / "calls").read_text() if (directory / "calls").exists() else ""
    (directory / "calls").unlink(missing_ok=True)
    return [line.split("|")[:-1] for line in text.splitlines()]


def installs(found: list[list[str]]) -> list[str]:
    """The last words of what pip was told."""
    return [call[-1] for call in found if call[0] == "python" and "install" in call]


def test_make_compile_llm_installs_the_first_lock_and_says_how_much_that_is(installed_tree):
    done = make("compile-llm", directory=installed_tree)
    assert done.returncode == 0, done.stderr
    assert installs(calls(installed_tree)) == [BASE, "."]
    assert re.search(r"\d+ MB to fetch, \d+ MB on disk", done.stderr)
    done = make("test", directory=installed_tree)
    first, *rest = installs(calls(installed_tree))
    assert first.startswith("torch==") and rest == [TEST] and re.search(r"\d GB on disk", done.stderr)
    make("compile-llm", directory=installed_tree)
    assert installs(calls(installed_tree)) == []


def test_make_installs_the_lock_once_and_again_when_it_changes(installed_tree):
    assert make("test", directory=installed_tree).returncode == 0
    first = calls(installed_tree)
    assert installs(first)[:2] == [BASE, "."] and installs(first)[-1] == TEST
    assert first[-1] == ["python", "-m", "pytest"]
    assert make("test", directory=installed_tree).returncode == 0
    assert calls(installed_tree) == [["python", "-m", "pytest"]]
    with open(installed_tree / BASE, "a") as file:
        file.write("# changed\n")
    for _ in range(2):
        make("test", directory=installed_tree)
    assert len(calls(installed_tree)) == len(first) + 1
    # Back to the first lock: what is installed is the second's.
    shutil.copy(ROOT / BASE, installed_tree)
    make("test", directory=installed_tree)
    assert len(calls(installed_tree)) == len(first)


def test_make_test_aarch64_fails_where_it_cannot_be_set_up(installed_tree, monkeypatch):
    assert make("test-aarch64", directory=installed_tree).returncode == 0
    setup, tests = calls(installed_tree)[-2:]
    assert setup == ["python", "-m", "tests.aarch64", "build/aarch64"] and tests[-1] == "tests/test_aarch64.py"
    program = installed_tree / ".venv/bin/python"
    program.write_text(program.read_text() + '[ "$2" != tests.aarch64 ]\n')
    assert make("test-aarch64", directory=installed_tree).returncode != 0
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
def test_make_compile_llm_hands_its_variables_on(installed_tree, options, compiled, asked):
    done = make("compile-llm", *options, directory=installed_tree)
    assert done.returncode == 0, done.stderr
    compiling, running = calls(installed_tree)[-2:]
    assert compiling == ["castiron", "compile", *compiled]
    assert running[:3] == ["castiron", "run", compiled[2]] and running[3 : 3 + len(asked)] == asked


def test_a_failing_compile_is_not_followed_by_a_run(installed_tree):
    program = installed_tree / ".venv/bin/castiron"
    program.write_text('#!/bin/sh\necho "$1" >> calls\nexit 1\n')
    assert make("compile-llm", directory=installed_tree).returncode != 0
    assert [call for call in (installed_tree / "calls").read_text().splitlines() if "|" not in call] == ["compile"]


def test_make_coverage_says_a_line_a_package_and_passes_the_tests_status_on(installed_tree):
    done = make("coverage", directory=installed_tree)
    assert done.returncode == 0, done.stderr
    assert sorted(line.split()[0] for line in done.stdout.splitlines()) == sorted(PACKAGES)
    assert ["python", "-m", "coverage", "run", "-m", "pytest"] in calls(installed_tree)
    settings = tomllib.loads((installed_tree / "pyproject.toml").read_text())["tool"]["coverage"]["run"]
    assert sorted(settings["source"]) == sorted(PACKAGES)
    python = installed_tree / ".venv/bin/python"
    python.write_text(python.read_text() + 'case "$*" in *pytest*) exit 3;; esac\n')
    assert make("coverage", directory=installed_tree).returncode != 0


def test_ci_runs_the_tests_and_passes_their_status_on(installed_tree):
    shutil.copytree(ROOT / ".ci", installed_tree / ".ci")
    python = installed_tree / ".venv/bin/python"
    assert run_in(installed_tree, "bash", ".ci/run").returncode == 0
    python.write_text(python.read_text() + "exit 3\n")
    assert run_in(installed_tree, "bash", ".ci/run").returncode != 0
