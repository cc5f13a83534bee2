"""Measure the importance of each column of a weight on a text (llama.cpp's importance matrix).

A matmul multiplies the quantisation error of a column by the column's input. To measure inputs, the
unquantised model reads the text, and each matmul gets an extra output: for each column, the sum of
the squared inputs over all tokens, or over those that are routed to an expert.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence, Set
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from castiron.emitter.graph import ops
from castiron.emitter.graph.ir import Graph, Module, Value, building
from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.types import F32
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.lowering import lower
from castiron.pipelines.checkpoints.adapter import adapter_sha256
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, tokenizer_of
from castiron.pipelines.checkpoints.open_checkpoint import checkpoint_sha256
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.compile_options import Options, Progress
from castiron.pipelines.compile.weight_codecs import UNIFORM, Importance, write_parameters
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import read_text, require_free_space
from castiron.pipelines.terminal import print_message
from castiron.pipelines.text.tokenizer import encode_text
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.cache_folder import cache_folder, cache_path, keep
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.device.program import Call, Loaded
from castiron.vmfb.targets import resolve

KIND = "calibrated"
# Tokens of a call, tokens of a sequence, and max sequences; more text changes means by about 1 %.
WIDTH, CHUNK, MAX_CHUNKS = 128, 512, 32
# Min importance of a column, as a fraction of the mean, because another text may use the column.
MIN_SHARE = 1e-3


def text_sha256(text: str | Path) -> str:
    return hashlib.sha256(Path(text).read_bytes()).hexdigest()


def calibrate(checkpoint: Checkpoint, options: Options, progress: Progress) -> Importance:
    """Return the importance on the text `options.calibrate`, cached on disk; empty without one."""
    text = options.calibrate
    if not text:
        return UNIFORM
    if checkpoint.encoding:
        raise CheckpointError(f"cannot calibrate an embedding model: {checkpoint.path}; leave --calibrate out")
    adapter = adapter_sha256(Path(options.adapter)) if options.adapter else None
    inputs = [checkpoint_sha256(checkpoint.path), adapter, text_sha256(text), WIDTH, CHUNK, MAX_CHUNKS, "experts"]
    key = hashlib.sha256(json.dumps(inputs).encode()).hexdigest()
    cached = cache_path(KIND) / f"{key}.npz"
    # NumPy raises many kinds of error for a damaged file, whose content is then computed again.
    with contextlib.suppress(Exception):
        with np.load(cached) as found:
            return dict(found)
    chunks = chunks_of(checkpoint, text)
    print_message(f"calibrating on {len(chunks)} x {CHUNK} tokens of {text}")
    found = measure(checkpoint, chunks, progress)
    data = io.BytesIO()
    np.savez(data, **found)
    keep(cache_folder(KIND) / f"{key}.npz", data.getvalue())
    return found


def chunks_of(checkpoint: Checkpoint, text: str | Path) -> list[list[int]]:
    """Split a text's tokens into up to MAX_CHUNKS sequences of CHUNK tokens, or one shorter one."""
    if checkpoint.tokenizer is None:
        raise PipelineError(f"{checkpoint.path} has no tokenizer to calibrate with; leave --calibrate out")
    tokens = encode_text(
        tokenizer_of(checkpoint.tokenizer, checkpoint.path), read_text(Path(text)), add_special_tokens=False
    ).ids
    length = min(CHUNK, len(tokens) // WIDTH * WIDTH)
    if not length:
        raise PipelineError(f"{text} has {len(tokens)} tokens, and calibration needs {WIDTH}; give a longer text")
    return [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)][:MAX_CHUNKS]


def measure(checkpoint: Checkpoint, chunks: Sequence[list[int]], progress: Progress) -> dict[str, np.ndarray]:
    """Return columns' mean square inputs, divided by their average; `chunks` have equal lengths."""
    model = build_model(checkpoint, Options(context=len(chunks[0]), prefill=(), batch=(), verify_widths=(), embed=(WIDTH,)))
    function = model.functions.pop(f"embed_{WIDTH}")
    model.functions.clear()
    names: list[tuple[tuple[str, ...], ...]] = [(group,) for group in sum_squared_inputs(model, function)]
    model.functions[function.name] = function
    target, threads = resolve("host"), physical_cores()
    module = lower(model, "kernels", target.isa, threads)
    function = module.functions[function.name]
    names += sum_squared_expert_inputs(module, function, {name for groups in names for group in groups for name in group})
    text = print_module(module)
    with TemporaryDirectory(prefix="castiron-") as folder:
        vmfb, weights = Path(folder) / "model.vmfb", Path(folder) / "weights.irpa"
        require_free_space(weights, sum(param.type.nbytes for param in module.params.values()), "calibrating")
        progress("compile for calibration", 0.0)
        compile_mlir(text, target, vmfb)
        write_parameters(weights, checkpoint, module, UNIFORM, lambda done: progress("pack for calibration", done))
        loaded = Loaded(Part.of(weights).map(), {vmfb.name: vmfb.read_bytes()}, threads)
        sums = _run(loaded, function, names, chunks, progress)
    importance = {}
    for groups, totals in zip(names, sums, strict=True):
        for group, total in zip(groups, totals.reshape(len(groups), -1), strict=True):
            for name in group:
                importance[name] = np.maximum(total / max(total.mean(), 1e-30), MIN_SHARE).astype(np.float32)
    return importance


def sum_squared_inputs(model: ModelModule, function: Graph) -> list[tuple[str, ...]]:
    """Add outputs to `function`: for each input x of a matmul, the sum of x² over tokens, f32 [in].

    Returns for each the names of the weights that are multiplied by x.
    """
    weights = {op.results[0]: op.attrs["weight"] for op in function.ops if op.kind == "weight"}
    # Gate and up projections of experts read the operation's x. The input of the down projection
    # exists only in the lowered module (`sum_squared_expert_inputs`).
    read = {"linear": (1,), "experts": (3, 4)}
    by_input: dict[Value, list[str]] = {}
    for op in function.ops:
        if op.kind in read:
            operands = read[op.kind][: 1 if op.attrs.get("gated") is False else None]
            names = [name for at in operands for name, _ in weights[op.operands[at]].tensors]
            by_input.setdefault(op.operands[0], []).extend(names)
    # The head reads the hidden states that this function returns.
    by_input.setdefault(function.outputs[0], []).extend(("lm_head.weight", "model.embed_tokens.weight"))
    with building(model, function):
        sums = [ops.reduce("add", ops.multiply(x, x), (0,)) for x in by_input]
    function.outputs += tuple(sums)
    function.output_names += tuple(f"squares_{index}" for index in range(len(sums)))
    return [tuple(dict.fromkeys(names)) for names in by_input.values()]


def sum_squared_expert_inputs(module: Module, function: Graph, known: Set[str]) -> list[tuple[tuple[str, ...], ...]]:
    """Add outputs to a lowered function: sums of x² for inputs x of experts, f32 [experts, in].

    known: weights that have such sums. Returns for each output an item (weight,) per expert.
    """
    made = {result: op for op in function.ops for result in op.results}
    names, sums = [], []
    for op in list(function.ops):
        kernel = op.attrs.get("kernel")
        if kernel is None or kernel.matmul is None or not kernel.matmul.experts:
            continue
        operands = dict(zip(kernel.tensors, op.operands))
        tensors = module.params[made[operands["weight"]].attrs["name"]].source.tensors
        if known.isdisjoint(name for name, _ in tensors):
            x, experts = operands["x"], kernel.matmul.experts
            if made[x].kind == "kernel" and "split" in made[x].attrs["kernel"].name:
                x = made[x].operands[0]
            with building(module, function):
                chosen = ops.broadcast_in_dim(operands["chosen"], (x.shape[0], experts), (0,))
                # Not converted from i1 to f32, because IREE 3.13 reads a true i1 in a matmul as -1.
                one, zero = (ops.constant(number, F32, chosen.shape) for number in (1.0, 0.0))
                ours = ops.select(ops.compare("EQ", chosen, ops.iota(chosen.shape, 1)), one, zero)
                sums.append(ops.dot_general(ours, ops.multiply(x, x), ((0,), (0,))))
            names.append(tuple((name,) for name, _ in tensors))
    function.outputs += tuple(sums)
    function.output_names += tuple(f"experts_{index}" for index in range(len(sums)))
    return names


def _run(loaded: Loaded, function: Graph, names: Sequence, chunks: Sequence[list[int]], progress: Progress) -> list[np.ndarray]:
    results = len(function.outputs)
    assert function.entry is not None, "a model's function has a role"
    sums = [np.zeros(value.shape, np.float64) for value in function.outputs[results - len(names) :]]
    for done, chunk in enumerate(chunks):
        progress("calibrate", done / len(chunks))
        tokens, start, length = loaded.zeros((WIDTH,), "i32"), loaded.zeros((), "i32"), loaded.zeros((), "i32")
        states = [loaded.zeros(state.shape, state.dtype) for state in function.states]
        call = Call(loaded, function.entry, (tokens, start, length, *states))
        length.words[0] = WIDTH
        for at in range(0, len(chunk), WIDTH):
            tokens.array[:] = chunk[at : at + WIDTH]
            start.words[0] = at
            call.invoke()
            for index, total in enumerate(sums):
                total += call.floats(results - len(sums) + index)
    progress("calibrate", 1.0)
    return sums
