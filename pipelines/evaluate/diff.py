"""Compare the activations of every module with HF transformers, and find the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from castiron.emitter.ir import Graph, Op
from castiron.emitter.lowering import lower
from castiron.emitter.types import DTYPES
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, check_finite
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.options import Options
from castiron.pipelines.compile.weights import pack_parameter
from castiron.reference import hf, interpreter


@dataclass(frozen=True)
class ModuleDifference:
    """A module's path, and its largest difference by the root mean square of HF's values."""

    module: str
    difference: float


@dataclass(frozen=True)
class Difference:
    """The modules that were compared, in execution order, and the first that differs.

    first: index of the first module above the tolerance, or None. operations: (kind, module path)
    of the layer operations between the last equal module and the first different one.
    """

    modules: list[ModuleDifference]
    first: int | None
    operations: list[tuple[str, str]]


def compare(checkpoint: Checkpoint, tokens: Sequence[int], tolerance: float, lowering: str = "portable") -> Difference:
    """Run `tokens` through castiron's graph in the NumPy interpreter and through HF transformers.

    tolerance: largest `ModuleDifference.difference` at which a module counts as equal. OSError or
    ValueError for a checkpoint that HF cannot load.
    """
    if checkpoint.encoding:
        raise CheckpointError(f"{checkpoint.path} is an embedding model; castiron diff compares models that generate text")
    width = len(tokens)
    options = Options(context=width, lowering=lowering, prefill=(width,), batch=(), speculate=())
    model = build_model(checkpoint, options)
    check_finite(checkpoint)
    module = lower(model, lowering)
    function = f"prefill_{width}"
    ours = _activations(checkpoint, module, function, tokens)
    oracle = hf.load(checkpoint.path)
    # A module within a block (`self_attn`) has no counterpart: its last operation in our graph may be the residual.
    names = [n for n, m in oracle.named_modules() if n in ours and (n.split(".")[-1].isdigit() or not any(m.children()))]
    theirs = hf.activations(oracle, tokens, names)
    order = sorted(names, key=lambda name: ours[name][0])
    differences = [(name, _distance(ours[name][1], theirs[name])) for name in order]
    compared = [ModuleDifference(name, difference) for name, difference in differences if difference is not None]
    first = next((i for i, c in enumerate(compared) if not c.difference <= tolerance), None)
    return Difference(compared, first, _between(model.functions[function], compared, first))


def _activations(checkpoint: Checkpoint, module, function: str, tokens: Sequence[int]) -> dict:
    """Return (index, result) of the last f32 operation of each module, by the module's path."""
    body = module.functions[function]
    states = [np.zeros(state.shape, DTYPES[state.dtype].numpy) for state in body.states]
    params = {name: pack_parameter(checkpoint, param) for name, param in module.params.items()}
    found: dict[str, tuple[int, np.ndarray]] = {}
    count = 0

    def trace(op: Op, results: tuple[np.ndarray, ...]) -> None:
        nonlocal count
        count += 1
        if op.kind in ("parameter", "constant") or results[0].dtype != np.float32 or results[0].ndim < 2:
            return
        parts = op.path.split(".")
        for length in range(1, len(parts) + 1):
            # A block such as `model.layers.3` has the result of its last operation.
            if length == len(parts) or parts[length - 1].isdigit():
                found[".".join(parts[:length])] = count, results[0]

    inputs = [np.asarray(tokens, np.int32), np.int32(0), np.int32(len(tokens)), *states]
    interpreter.run(module, function, inputs, params, trace)
    return found


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """Return the largest difference, relative to the root mean square of `theirs`.

    None if the shapes differ.
    """
    rows = theirs.reshape(len(theirs), -1) if theirs.ndim > 1 else theirs[None]
    mine = ours.reshape(len(ours), -1)
    if len(mine) == 1:
        rows = rows[-1:]
    if mine.shape != rows.shape:
        return None
    scale = float(np.sqrt(np.mean(np.square(rows, dtype=np.float64)))) or 1.0
    worst = float(np.max(np.abs(mine - rows)))
    return worst / scale if np.isfinite(worst) else float("inf")


def _between(function: Graph, compared: list[ModuleDifference], first: int | None) -> list[tuple[str, str]]:
    """Return (kind, module path) of the operations after the last equal module, up to the end of
    the first different one."""
    if first is None:
        return []

    def last(name: str) -> int:
        return max(i for i, op in enumerate(function.ops) if op.path == name or op.path.startswith(name + "."))

    end = last(compared[first].module)
    before = [last(c.module) for c in compared[:first]]
    start = max((index for index in before if index < end), default=-1)
    return [(op.kind, op.path) for op in function.ops[start + 1 : end + 1] if op.kind != "weight"]
