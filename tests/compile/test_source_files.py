"""The keys of bundles and of tuned tiles change with the sources that they depend on, and no others."""

from __future__ import annotations

import shutil

import pytest

from castiron.pipelines import files as sources
from castiron.pipelines.compile import compile_model as compiling
from castiron.pipelines.compile import tile_store as store
from castiron.pipelines.compile.compile_options import Options
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


BUNDLE, TILES = "the key of a bundle", "the key of tiles"


@pytest.mark.parametrize(
    ("file", "changed"),
    [
        ("emitter/kernels/weights/packing.py", {BUNDLE, TILES}),
        ("emitter/kernels/mlir/vector_math.py", {BUNDLE, TILES}),
        ("emitter/codecs/__init__.py", {BUNDLE, TILES}),
        ("emitter/models/llama.py", {BUNDLE}),
        ("pipelines/checkpoints/gguf/config_rules.py", {BUNDLE}),
        ("pipelines/compile/compile_model.py", {BUNDLE}),
        ("pipelines/text/tool_formats.py", {BUNDLE}),
        ("vmfb/bundle/irpa.py", {BUNDLE}),
        ("pipelines/cli/compile.py", set()),
        ("pipelines/engine/engine.py", set()),
        ("pipelines/evaluate/tune.py", set()),
    ],
)
def test_a_bundle_is_out_of_date_when_code_that_made_it_changes(tmp_path, touch, file, changed):
    checkpoint, host = write_llama(tmp_path / "tiny.gguf"), resolve("host")
    keys = lambda: {BUNDLE: compiling._key(checkpoint, Options(), host, "3.13.0"), TILES: store.key_of(host, 2)}
    before = keys()
    touch(file)
    assert {name for name, key in keys().items() if key != before[name]} == changed
