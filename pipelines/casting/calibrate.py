"""How large the inputs of a model's products are on a text, by which `--calibrate` weighs the columns of their weights.

The unquantised model runs the text with one more result for each product: the sum of the squares of its inputs, a number a
column. An error in a column of the weight reaches the product's result in that measure (llama.cpp calls it an importance
matrix). What an expert passes on to its second product is counted where it was chosen.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.emitter import ops
from castiron.emitter.ir import Function, Module, Param, Value, building
from castiron.emitter.lowering import lower
from castiron.emitter.printer import print_module
from castiron.emitter.step import ModelModule
from castiron.emitter.types import F32
from castiron.pipelines.checkpoints import Checkpoint
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.tokenizing import encoded
from castiron.pipelines.generation.trial import tokenizer_of
from castiron.pipelines.progress import say
from castiron.pipelines.space import need_room
from castiron.vmfb.archive import Part
from castiron.vmfb.aside import scratch
from castiron.vmfb.cache import cache_folder, cache_place, keep
from castiron.vmfb.compiler import compile_mlir
from castiron.vmfb.cpu import physical_cores
from castiron.vmfb.manifest import EntryPoint
from castiron.vmfb.program import Call, Loaded
from castiron.vmfb.targets import resolve
from castiron.vmfb.weights import write_irpa

KIND = "calibrated"
# Tokens of a call, of a sequence, and sequences at most: as many as change the means by about a percent.
WIDTH, CHUNK, MOST_CHUNKS = 128, 512, 32
# Columns that the text left alone count this share of the mean: another text may not.
LEAST = 1e-3

Importance = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Run:
    """What it takes to run a checkpoint: build(context, width) gives a module with embed functions of that width, pack(param)
    the array of a parameter."""

    build: Callable[[int, int], ModelModule]
    pack: Callable[[Param], np.ndarray]


def text_sha256(text: str | Path) -> str:
    """Of a text file, in hex; PipelineError if it cannot be read."""
    try:
        return hashlib.sha256(Path(text).read_bytes()).hexdigest()
    except OSError as error:
        raise PipelineError(f"{text} cannot be read: {error.strerror}") from None


def importance_of(
    checkpoint: Checkpoint, identity: str, text: str | Path, run: Run, progress: Callable[[str, float], None]
) -> dict[str, np.ndarray]:
    """By tensor: the mean square of what each column is multiplied by on the text, as a share of the mean over columns, [in]
    f32; of matrices that are no product's there is none.

    identity: what the checkpoint's weights are known by; what was found of them is kept in the cache. run: how the model is
    built and its weights are packed. PipelineError for a text
    that is too short, or a checkpoint without a tokenizer.
    """
    told = [identity, text_sha256(text), WIDTH, CHUNK, MOST_CHUNKS, "experts"]
    key = hashlib.sha256(json.dumps(told).encode()).hexdigest()
    kept = cache_place(KIND) / f"{key}.npz"
    # A file that is spoilt, in whatever way NumPy finds out, counts for nothing.
    with contextlib.suppress(Exception):
        with np.load(kept) as found:
            return dict(found)
    chunks = chunks_of(checkpoint, text)
    say(f"calibrating on {len(chunks)} x {CHUNK} tokens of {text}")
    found = measured(run, chunks, progress)
    data = io.BytesIO()
    np.savez(data, **found)
    keep(cache_folder(KIND) / f"{key}.npz", data.getvalue())
    return found


def chunks_of(checkpoint: Checkpoint, text: str | Path) -> list[list[int]]:
    """The text's tokens, CHUNK a sequence; what is left at its end is left out."""
    if checkpoint.tokenizer is None:
        raise PipelineError(f"{checkpoint.path} has no tokenizer, so a text cannot calibrate it: leave --calibrate out")
    try:
        content = Path(text).read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PipelineError(f"{text} is not a text in UTF-8: give one to calibrate on") from None
    tokens = encoded(tokenizer_of(checkpoint.tokenizer, checkpoint.path), content, False)
    length = min(CHUNK, len(tokens) // WIDTH * WIDTH)
    if not length:
        raise PipelineError(f"{text} has {len(tokens)} tokens, and calibrating takes {WIDTH} at least: give a longer text")
    return [tokens[at : at + length] for at in range(0, len(tokens) - length + 1, length)][:MOST_CHUNKS]


def measured(run: Run, chunks: Sequence[list[int]], progress: Callable[[str, float], None]) -> dict[str, np.ndarray]:
    """What `importance_of` gives, of chunks of one length."""
    model = run.build(len(chunks[0]), WIDTH)
    function = model.functions.pop(f"embed_{WIDTH}")
    model.functions.clear()
    names: list[tuple[tuple[str, ...], ...]] = [(group,) for group in watched(model, function)]
    model.functions[function.name] = function
    target, threads = resolve("host"), physical_cores()
    module = lower(model, "kernels", target.isa, threads)
    function = module.functions[function.name]
    names += watched_experts(module, function, {name for groups in names for group in groups for name in group})
    text = print_module(module)
    with scratch("calibrate") as place:
        vmfb, weights = place / "model.vmfb", place / "weights.irpa"
        need_room(weights, sum(param.type.nbytes for param in module.params.values()), "calibrating")
        progress("compile for calibration", 0.0)
        compile_mlir(text, target, vmfb)
        entries = [(p.name, lambda p=p: run.pack(p), (p.type.shape, p.type.dtype.numpy)) for p in module.params.values()]
        write_irpa(weights, entries, lambda done, total: progress("pack for calibration", done / total))
        loaded = Loaded(Part.of(weights).map(), vmfb.read_bytes(), threads)
        sums = _run(loaded, function, names, chunks, progress)
    found = {}
    for groups, totals in zip(names, sums, strict=True):
        for group, total in zip(groups, totals.reshape(len(groups), -1), strict=True):
            for name in group:
                found[name] = np.maximum(total / max(total.mean(), 1e-30), LEAST).astype(np.float32)
    return found


def watched(model: ModelModule, function: Function) -> list[tuple[str, ...]]:
    """Gives the function one more result for each x that products read, the sums over tokens of its squares [in]; the names of
    the tensors that each is multiplied by, in that order."""
    weights = {op.results[0]: op.attrs["weight"] for op in function.ops if op.kind == "weight"}
    # An op of experts reads x as gate and up; what down reads is seen in its kernels (`watched_experts`).
    read = {"linear": (1,), "experts": (3, 4)}
    by_input: dict[Value, list[str]] = {}
    for op in function.ops:
        if op.kind in read:
            places = read[op.kind][: 1 if op.attrs.get("gated") is False else None]
            names = [name for at in places for name, _ in weights[op.operands[at]].tensors]
            by_input.setdefault(op.operands[0], []).extend(names)
    # The head's own product is not in a function of hidden states, which are what it reads.
    by_input.setdefault(function.outputs[0], []).extend(("lm_head.weight", "model.embed_tokens.weight"))
    with building(model, function):
        sums = [ops.reduce("add", ops.multiply(x, x), (0,)) for x in by_input]
    function.outputs += tuple(sums)
    function.output_names += tuple(f"squares_{index}" for index in range(len(sums)))
    return [tuple(dict.fromkeys(names)) for names in by_input.values()]


def watched_experts(module: Module, function: Function, known: Set[str]) -> list[tuple[tuple[str, ...], ...]]:
    """Gives a lowered function one more result for each product of experts whose tensors are not `known`: the sums of the
    squares of what each expert reads where it was chosen [experts, in]; the names of its tensors, expert by expert."""
    made = {result: op for op in function.ops for result in op.results}
    names, sums = [], []
    for op in list(function.ops):
        kernel = op.attrs.get("kernel")
        if kernel is None or kernel.product is None or not kernel.product.experts:
            continue
        operands = dict(zip(kernel.tensors, op.operands))
        tensors = module.params[made[operands["weight"]].attrs["name"]].source.tensors
        if known.isdisjoint(name for name, _ in tensors):
            x, experts = operands["x"], kernel.product.experts
            if made[x].kind == "kernel" and "split" in made[x].attrs["kernel"].name:
                x = made[x].operands[0]
            with building(module, function):
                chosen = ops.broadcast_in_dim(operands["chosen"], (x.shape[0], experts), (0,))
                # Not converted: IREE 3.13 takes a true i1 that goes into a product for -1.
                one, zero = (ops.constant(number, F32, chosen.shape) for number in (1.0, 0.0))
                ours = ops.select(ops.compare("EQ", chosen, ops.iota(chosen.shape, 1)), one, zero)
                sums.append(ops.dot_general(ours, ops.multiply(x, x), ((0,), (0,))))
            names.append(tuple((name,) for name, _ in tensors))
    function.outputs += tuple(sums)
    function.output_names += tuple(f"experts_{index}" for index in range(len(sums)))
    return names


def _run(
    loaded: Loaded, function: Function, names: Sequence, chunks: Sequence[list[int]], progress: Callable[[str, float], None]
) -> list[np.ndarray]:
    """The sums of squares over all chunks, each a sequence of its own, f64."""
    results = len(function.outputs)
    entry = EntryPoint(function.role, function.name, function.width, (), ("",) * results)
    sums = [np.zeros(value.shape, np.float64) for value in function.outputs[results - len(names) :]]
    for done, chunk in enumerate(chunks):
        progress("calibrate", done / len(chunks))
        tokens, start, length = loaded.zeros((WIDTH,), "i32"), loaded.zeros((), "i32"), loaded.zeros((), "i32")
        states = [loaded.zeros(state.shape, state.dtype.name) for state in function.states]
        call = Call(loaded, entry, (tokens, start, length, *states))
        length.words[0] = WIDTH
        for at in range(0, len(chunk), WIDTH):
            tokens.array[:] = chunk[at : at + WIDTH]
            start.words[0] = at
            call.invoke()
            for index, total in enumerate(sums):
                total += call.floats(results - len(sums) + index)
    progress("calibrate", 1.0)
    return sums
