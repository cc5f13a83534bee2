"""The keys of bundles and of tuned tiles: they change with what the code imports, and with nothing else."""

from __future__ import annotations

import pkgutil
from pathlib import Path

import pytest

from castiron.emitter.kernels import products
from castiron.pipelines.casting import compile as compiling
from castiron.pipelines.casting import sources
from castiron.pipelines.casting.compile import Options
from castiron.pipelines.checkpoints import open_checkpoint
from castiron.pipelines.tuning import store
from castiron.vmfb.targets import resolve
from tests.pipelines.tiny_gguf import write_llama

TREE = {
    "part/__init__.py": "from castiron.part.started import x",
    "part/started.py": "x = 1",
    "part/root.py": "import json\nfrom castiron.part import lazy\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from castiron.part import typed\n",
    "part/lazy.py": "def f():\n    import castiron.other.deep as deep\n    from castiron.other.deep import g\n",
    "part/typed.py": "",
    "part/unrelated.py": "import castiron.part.root",
    "other/__init__.py": "",
    "other/deep.py": "def g(): pass",
}


@pytest.fixture
def tree(tmp_path) -> Path:
    for name, text in TREE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_files_are_those_that_are_imported_however_deep(tree):
    found = sources.source_files("castiron.part.root", root=tree)
    assert {name: path.relative_to(tree).as_posix() for name, path in found.items()} == {
        "castiron.other": "other/__init__.py",
        "castiron.other.deep": "other/deep.py",
        "castiron.part": "part/__init__.py",
        "castiron.part.lazy": "part/lazy.py",
        "castiron.part.root": "part/root.py",
        "castiron.part.started": "part/started.py",
    }
    whole = sources.source_files("castiron.part", root=tree)
    assert set(whole) - set(found) == {"castiron.part.typed", "castiron.part.unrelated"}
    with pytest.raises(ModuleNotFoundError, match="castiron.moved"):
        sources.source_files("castiron.moved", root=tree)


@pytest.fixture
def touched(monkeypatch):
    """Hashes files as if the module it is told had changed, and were as long as before."""
    found = sources.source_files

    def touch(module: str, path: Path) -> None:
        path.write_bytes(found(module)[module].read_bytes()[::-1])
        monkeypatch.setattr(
            sources, "source_files", lambda *names: {n: path if n == module else p for n, p in found(*names).items()}
        )
        sources.sources_hash.cache_clear()

    yield touch
    sources.sources_hash.cache_clear()


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        ("castiron.emitter.kernels.weights.packing", True),
        ("castiron.emitter.lowering.fusion", True),
        ("castiron.emitter.models.llama", True),
        ("castiron.pipelines.checkpoints.gguf_rope", True),
        ("castiron.pipelines.casting.compile", True),
        ("castiron.vmfb.weights", True),
        ("castiron.emitter.models.gemma2", False),
        ("castiron.vmfb.session", False),
        ("castiron.pipelines.cli", False),
        ("castiron.pipelines.commands.compile", False),
        ("castiron.pipelines.serve.app", False),
    ],
)
def test_a_bundle_is_out_of_date_when_code_that_made_it_changes(tmp_path, touched, module, counts):
    checkpoint = open_checkpoint(write_llama(tmp_path / "tiny.gguf"))
    before = compiling._key(checkpoint, Options(), resolve("host"))
    touched(module, tmp_path / "touched.py")
    assert (compiling._key(checkpoint, Options(), resolve("host")) != before) is counts


@pytest.mark.parametrize(
    ("module", "counts"),
    [
        *((module.name, True) for module in pkgutil.walk_packages(products.__path__, products.__name__ + ".")),
        ("castiron.emitter.codecs", True),
        ("castiron.emitter.kernels.writing.vectors", True),
        ("castiron.emitter.kernels.weights.records", True),
        ("castiron.emitter.printer", False),
        ("castiron.emitter.models.llama", False),
        ("castiron.pipelines.tuning.search", False),
    ],
)
def test_tiles_hold_for_the_code_of_the_products_that_they_were_measured_with(tmp_path, touched, module, counts):
    before = store.key_of(resolve("host"), 2)
    touched(module, tmp_path / "touched.py")
    assert (store.key_of(resolve("host"), 2) != before) is counts
