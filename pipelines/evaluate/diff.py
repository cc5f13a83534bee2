"""Compare castiron's activations with those of HF transformers, module by module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from castiron.emitter.abi import Function
from castiron.emitter.graph.ir import Graph, Op
from castiron.emitter.graph.types import DTYPES
from castiron.emitter.lowering import lower
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, check_finite
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.weight_codecs import pack_parameter
from castiron.pipelines.evaluate.verify import dequantised
from castiron.reference import hf, interpreter


def compare(checkpoint: Checkpoint, tokens: Sequence[int], tolerance: float, lowering: str = "portable") -> dict[str, Any]:
    """Compare castiron's and HF's activations for the prompt `tokens`, module by module.

    Returns the object that `castiron diff --json` prints. A module's difference is the max absolute
    difference, divided by the root mean square of HF's values. `operations` are those after the
    preceding module, up to the end of the first module that differs.
    """
    if checkpoint.encoding:
        raise CheckpointError(f"{checkpoint.path} is an embedding model; give castiron diff a model that generates text")
    width = len(tokens)
    options = Options(context=width, lowering=lowering, prefill=(width,), batch=(), verify_widths=())
    model = build_model(checkpoint, options)
    check_finite(checkpoint)
    module = lower(model, lowering)
    function = Function("prefill", width, is_long=any(f.entry.is_long for f in model.functions.values())).name
    ours = _activations(checkpoint, module, function, tokens)
    with dequantised(checkpoint.path) as directory:
        oracle = hf.load(directory)
    # Compare blocks and leaf modules only: the last operation of a module like `self_attn` may be the residual addition.
    names = [n for n, m in oracle.named_modules() if n in ours and (n.split(".")[-1].isdigit() or not any(m.children()))]
    theirs = hf.activations(oracle, tokens, names)
    order = sorted(names, key=lambda name: ours[name][0])
    differences = {name: _distance(ours[name][1], theirs[name]) for name in order}
    modules = [{"module": name, "difference": value} for name, value in differences.items() if value is not None]
    first = next((i for i, module in enumerate(modules) if not module["difference"] <= tolerance), None)
    names = [module["module"] for module in modules]
    return {
        "equal": first is None,
        "first": None if first is None else names[first],
        "operations": [] if first is None else _between(model.functions[function], names[:first], names[first]),
        "modules": modules,
    }


def _activations(checkpoint: Checkpoint, module, function: str, tokens: Sequence[int]) -> dict:
    """Return {path of a layer or submodule: (number of its last f32 operation, result)}."""
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
            # The result of a block such as `model.layers.3` is that of its last operation.
            if length == len(parts) or parts[length - 1].isdigit():
                found[".".join(parts[:length])] = count, results[0]

    inputs = [np.asarray(tokens, np.int32), np.int32(0), np.int32(len(tokens)), *states]
    interpreter.run(module, function, inputs, params, trace)
    return found


def _distance(ours: np.ndarray, theirs: np.ndarray) -> float | None:
    """Return max |ours - theirs| / rms(theirs), or None if the arrays have different sizes."""
    rows = theirs.reshape(len(theirs), -1) if theirs.ndim > 1 else theirs[None]
    mine = ours.reshape(len(ours), -1)
    if len(mine) == 1:
        rows = rows[-1:]
    if mine.shape != rows.shape:
        return None
    scale = float(np.sqrt(np.mean(np.square(rows, dtype=np.float64)))) or 1.0
    worst = float(np.max(np.abs(mine - rows)))
    return worst / scale if np.isfinite(worst) else float("inf")


def _between(function: Graph, equal: Sequence[str], different: str) -> list[tuple[str, str]]:
    def last(name: str) -> int:
        return max(i for i, op in enumerate(function.ops) if op.path == name or op.path.startswith(name + "."))

    end = last(different)
    start = max((index for index in map(last, equal) if index < end), default=-1)
    return [(op.kind, op.path) for op in function.ops[start + 1 : end + 1] if op.kind != "weight"]
