"""Bundles of the toy model for tests."""

from __future__ import annotations

from pathlib import Path

from castiron.vmfb.bundle import BundleWriter
from castiron.vmfb.compiler import compile_mlir, compiler_version
from castiron.vmfb.manifest import MODEL, WEIGHTS, Manifest, Versions, entry_points
from castiron.vmfb.states import State
from castiron.vmfb.targets import TARGETS, Target
from castiron.vmfb.weights import write_irpa
from tests.vmfb import toy


def manifest(context: int, widths: tuple[int, ...], target: Target = TARGETS["host"]) -> Manifest:
    """The manifest of a toy bundle, its files not filled in."""
    states = tuple(State(name, (toy.LAYERS, context, 1, toy.HEAD_DIM), "f32", "positional") for name in "kv")
    return Manifest(
        name="toy", config={"model_type": "toy"}, vocab=toy.VOCAB, context=context, states=states,
        functions=entry_points(states, toy.VOCAB, {"decode": (1,), "prefill": widths}), numerics="exact", lowering="portable", weights="native",
        codecs={"f32": 2}, target=target, versions=Versions("0", compiler_version()),
    )  # fmt: skip


def write(directory: Path, context: int, widths: tuple[int, ...], *, target: Target = TARGETS["host"], cache_dir=None):
    """Compiles and writes a toy bundle; returns it opened."""
    with BundleWriter(directory) as writer:
        compile_mlir(toy.module_text(context, widths), target, writer.path(MODEL), cache_dir=cache_dir)
        entries = [(name, array, (array.shape, array.dtype)) for name, array in toy.weights().items()]
        written = write_irpa(writer.path(WEIGHTS), entries)
        return writer.commit(manifest(context, widths, target), {WEIGHTS: written})
