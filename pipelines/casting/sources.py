"""Which of castiron's own source files decide a result, by what the code imports: for the keys under which results are kept."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "castiron"
ROOT = Path(__file__).parents[2]


@cache
def sources_hash(*names: str) -> str:
    """A hash of the files of `source_files`, in hex."""
    digest = hashlib.sha256()
    for name, path in source_files(*names).items():
        digest.update(f"{name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def source_files(*names: str, root: Path = ROOT) -> dict[str, Path]:
    """By module, in alphabetical order, the files of the modules `names` and of all that they import from castiron.

    A package among `names` stands for all of its modules. `root` holds the folders of castiron's packages. castiron's
    own __init__ is left out: it names everything, and decides nothing but the version.
    """
    found: dict[str, Path] = {}
    waiting = [module for name in names for module in _with_submodules(name, root)]
    while waiting:
        name = waiting.pop()
        path = _file(name, root)
        if path is None or name in found:
            continue
        found[name] = path
        # Importing a module runs the packages that it is in.
        waiting += [name.rpartition(".")[0], *_imports(path.read_bytes())]
    return dict(sorted(found.items()))


def _with_submodules(name: str, root: Path) -> Iterator[str]:
    yield name
    path = _file(name, root)
    if path is None:
        raise ModuleNotFoundError(f"{PACKAGE} has no module {name}", name=name)
    if path.name == "__init__.py":
        for part in sorted(path.parent.rglob("*.py")):
            yield ".".join([name, *part.relative_to(path.parent).with_suffix("").parts]).removesuffix(".__init__")


def _file(name: str, root: Path) -> Path | None:
    """The source of a module of castiron; None for any other name, such as that of a function in a module."""
    package, *parts = name.split(".")
    if package != PACKAGE or not parts:
        return None
    path = root.joinpath(*parts)
    return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)


@cache
def _imports(source: bytes) -> tuple[str, ...]:
    """What a module imports, in functions too; what a type checker alone reads is left out."""
    found, waiting = [], [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)
    return tuple(found)
