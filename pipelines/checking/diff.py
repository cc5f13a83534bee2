"""A model beside HF transformers, module by module: where the first activation differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from castiron.emitter.ir import Function, Op
from castiron.emitter.lowering import lower
from castiron.pipelines.casting.compile import Options, build_model, packed_parameter
from castiron.pipelines.casting.soundness import check_finite
from castiron.pipelines.checkpoints import Checkpoint, CheckpointError
from castiron.reference import hf, interpreter


@dataclass(frozen=True)
class Compared:
    """One module of both sides: the largest difference, as a share of HF's root mean square there."""

    module: str
    difference: float


@dataclass(frozen=True)
class Difference:
    """Modules in the order in which they run, and where they part.

    first: index of the first module whose difference is above the tolerance, or None. operations: the layer operations
    that ran after the last module that agrees, up to and in the first that does not, as (kind, module path).
    """

    modules: list[Compared]
    first: int | None
    operations: list[tuple[str, str]]


def compare(checkpoint: Checkpoint, tokens: Sequence[int], tolerance: float, lowering: str = "portable") -> Difference:
    """Run `tokens` through the NumPy interpreter of our graph and through HF, which reads the checkpoint by itself.

    Raises EmitError or CheckpointError for what cannot be built, OSError or ValueError for what HF cannot load.
    """
    if checkpoint.encoding:
        raise CheckpointError(f"{checkpoint.path} encodes texts, and castiron diff compares models that generate")
    width = len(tokens)
    options = Options(context=width, lowering=lowering, batch=(), speculate=())
    model = build_model(checkpoint, options, (width,))
    check_finite(checkpoint)
    module = lower(model, lowering)
    function = f"prefill_{width}"
    ours = _activations(checkpoint, module, function, tokens)
    oracle = hf.load(checkpoint.path)
    # A module within a block (`self_attn`) has no counterpart: what our graph does last there may be the residual.
    names = [n for n, m in oracle.named_modules() if n in ours and (n.split(".")[-1].isdigit() or not any(m.children()))]
    theirs = hf.activations(oracle, tokens, names)
    order = sorted(names, key=lambda name: ours[name][0])
    compared = [
        Compared(name, difference) for name in order if (difference := _distance(ours[name][1], theirs[name])) is not None
    ]
    first = next((i for i, c in enumerate(compared) if not c.difference <= tolerance), None)
    return Difference(compared, first, _between(model.functions[function], compared, first))


def _activations(checkpoint: Checkpoint, module, function: str, tokens: Sequence[int]) -> dict:
    """By module path, and for a block by its prefix: when its last operation ran, and the last float result."""
    body = module.functions[function]
    states = [np.zeros(state.shape, state.dtype.numpy) for state in body.states]
    params = {name: packed_parameter(checkpoint, param) for name, param in module.params.items()}
    found: dict[str, tuple[int, np.ndarray]] = {}
    count = 0

    def trace(op: Op, results: tuple[np.ndarray, ...]) -> None:
        nonlocal count
        count += 1
        if op.kind in ("parameter", "constant") or results[0].dtype != np.float32 or results[0].ndim < 2:
            return
        parts = op.path.split(".")
        for length in range(1, len(parts) + 1):
            # `model.layers.3` is a block: it gives what its last operation gives. Deeper paths are modules by themselves.
            if length == len(parts) or parts[length - 1].isdigit():
                found[".".join(parts[:length])] = count, results[0]

    inputs = [np.asarray(tokens, np.int32), np.int32(0), np.int32(len(tokens)), *states]
    interpreter.run(module, function, inputs, params, trace)
    return found


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """Largest difference over HF's root mean square; None where the two are not the same thing."""
    rows = theirs.reshape(len(theirs), -1) if theirs.ndim > 1 else theirs[None]
    mine = ours.reshape(len(ours), -1)
    if len(mine) == 1:
        rows = rows[-1:]
    if mine.shape != rows.shape:
        return None
    scale = float(np.sqrt(np.mean(np.square(rows, dtype=np.float64)))) or 1.0
    worst = float(np.max(np.abs(mine - rows)))
    return worst / scale if np.isfinite(worst) else float("inf")


def _between(function: Function, compared: list[Compared], first: int | None) -> list[tuple[str, str]]:
    """Layer operations after the last agreeing module, up to the last of the first that differs."""
    if first is None:
        return []

    def last(name: str) -> int:
        return max(i for i, op in enumerate(function.ops) if op.path == name or op.path.startswith(name + "."))

    end = last(compared[first].module)
    before = [last(c.module) for c in compared[:first]]
    start = max((index for index in before if index < end), default=-1)
    return [(op.kind, op.path) for op in function.ops[start + 1 : end + 1] if op.kind != "weight"]
