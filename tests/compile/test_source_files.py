"""The keys of bundles and of tuned tiles change with the sources that they depend on, and no others."""

from __future__ import annotations

import shutil

import pytest

from castiron.pipelines.compile import compiler as compiling
from castiron.pipelines.compile import source_hash as sources
from castiron.pipelines.compile import tile_store as store
from castiron.pipelines.compile.options import Options
from castiron.vmfb.targets import resolve
from tests.support.tiny_gguf import write_llama


@pytest.fixture
def touch(tmp_path, monkeypatch):
    """Return a function that changes a source file, at the same length, in a copy of the sources."""
    for package in ("emitter", "pipelines", "vmfb"):
        shutil.copytree(sources.ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "ROOT", tmp_path)
    sources.sources_hash.cache_clear()

    def change(name: str) -> None:
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[::-1])
        sources.sources_hash.cache_clear()

    yield change
    sources.sources_hash.cache_clear()


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("emitter/kernels/weights/packing.py", True),
        ("emitter/models/llama.py", True),
        ("pipelines/checkpoints/gguf_rules.py", True),
        ("pipelines/compile/compiler.py", True),
        ("pipelines/text/tool_formats.py", True),
        ("vmfb/weights.py", True),
        ("pipelines/cli/compile.py", False),
        ("pipelines/engine/engine.py", False),
        ("pipelines/server/app.py", False),
    ],
)
def test_a_bundle_is_out_of_date_when_code_that_made_it_changes(tmp_path, touch, file, counts):
    checkpoint = write_llama(tmp_path / "tiny.gguf")
    before = compiling._key(checkpoint, Options(), resolve("host"))
    touch(file)
    assert (compiling._key(checkpoint, Options(), resolve("host")) != before) is counts


@pytest.mark.parametrize(
    ("file", "counts"),
    [
        ("emitter/kernels/matmul/gemv.py", True),
        ("emitter/kernels/mlir/vector_math.py", True),
        ("emitter/codecs.py", True),
        ("emitter/printer.py", False),
        ("emitter/models/llama.py", False),
        ("pipelines/evaluate/tune.py", False),
    ],
)
def test_the_key_of_tiles_changes_with_the_matmul_kernels(touch, file, counts):
    before = store.key_of(resolve("host"), 2)
    touch(file)
    assert (store.key_of(resolve("host"), 2) != before) is counts
