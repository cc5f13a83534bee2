"""Compute the known answer of a GPU bundle: results with which a GPU's results are compared.

They are a small matmul for each codec of the weights, and logits of decode steps on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from castiron.emitter import layers
from castiron.emitter.codecs import codec_of, dequantise, row_bytes
from castiron.emitter.codecs.quantise import convert
from castiron.emitter.graph.ir import current_function
from castiron.emitter.graph.printer import print_module
from castiron.emitter.graph.stablehlo import build
from castiron.emitter.layers.operations import LAYERS
from castiron.emitter.layers.step import ModelModule, Weight
from castiron.emitter.lowering import lower
from castiron.pipelines.checkpoints.checkpoint import Checkpoint
from castiron.pipelines.compile.build_model import build_module
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.weight_codecs import Importance, codecs_of, write_parameters
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.manifest import MODEL, WEIGHTS, KnownLogits
from castiron.vmfb.compiler.iree_compile import compile_mlir
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.device.program import Call, Loaded
from castiron.vmfb.device.transfer import TEXT
from castiron.vmfb.targets import TARGETS

# Rows and columns of the weights of each matmul; decode steps; logits that are compared.
ROWS, COLUMNS, STEPS, IDS = 16, 256, 4, 32
# Bytes of weights above which there is no decode.
MAX_BYTES = 4_000_000_000
SCOPE = "known_answer"


@dataclass(frozen=True)
class Probes:
    """Small matmuls with known results.

    text: their MLIR, compiled as device.vmfb. parameters: inputs and weights, by their name in the
    bundle's weights file. expected: results by codec, one number for each row of the weight.
    """

    text: str
    parameters: dict[str, np.ndarray]
    expected: dict[str, tuple[float, ...]]


def make_probes(checkpoint: Checkpoint, options: Options) -> Probes:
    """Return small matmuls with weights of the model, one for each codec of the bundle."""
    codecs = codecs_of(checkpoint, options.weights, options.requantise)
    matrices = [tensor for tensor in checkpoint.tensors.values() if len(tensor.shape) == 2]
    raw, expected, module = dict[str, np.ndarray](), dict[str, tuple[float, ...]](), ModelModule("device", lambda name: "f32")
    for tensor in matrices:
        codec = codecs[tensor.name]
        if codec in expected:
            continue
        blocks = {codec_of(codec).block, codec_of(tensor.codec).block}
        columns = COLUMNS if tensor.shape[1] >= COLUMNS and all(COLUMNS % n == 0 for n in blocks) else tensor.shape[1]
        rows = np.ascontiguousarray(tensor.data[:ROWS, : row_bytes(tensor.codec, columns)])
        data = rows if codec == tensor.codec else convert(tensor.codec, rows, codec)
        name, x = f"{SCOPE}.{codec}", _activations(columns)
        raw[name] = data
        expected[codec] = tuple(float(v) for v in dequantise(codec, data).astype(np.float64) @ x[0])
        with module.function(f"matmul_{codec}"):
            vector = module.weight(Weight(f"{SCOPE}.x{columns}", x.shape, values=lambda x=x: x))
            weight = module.weight(Weight(name, (len(data), columns), codec))
            activations = build(LAYERS, "values", (vector,), (vector.type,))[0]
            current_function().returns({}, y=layers.project(activations, weight))
    lowered = lower(module, options.lowering)
    parameters = {
        param.name: np.ascontiguousarray(param.source.pack(*(raw[tensor] for tensor, _ in param.source.tensors)))
        for param in lowered.params.values()
    }
    body, end, _ = print_module(lowered).rpartition("}")
    return Probes(f"{body}{TEXT}{end}\n", parameters, expected)


def _activations(count: int) -> np.ndarray:
    return ((np.arange(count) * 37 % 64 - 32) / 32).astype(np.float32)[None]


def decode_on_cpu(checkpoint: Checkpoint, options: Options, importance: Importance) -> KnownLogits | None:
    """Return logits of decode steps; None for an embedding model, or more than `MAX_BYTES`."""
    target = TARGETS["host"]
    cpu_options = replace(
        options, target="host", lowering="kernels" if target.isa else "portable", numerics="exact", context=STEPS,
        max_context=STEPS, prefill=(), batch=(), verify_widths=(), embed=(), iree_flags=(),
    )  # fmt: skip
    if checkpoint.encoding is not None:
        return None
    module = build_module(checkpoint, cpu_options, target)
    if sum(param.type.nbytes for param in module.params.values()) > MAX_BYTES:
        return None
    function = module.functions["decode_step"]
    assert function.entry is not None, "a model's function has a role"
    vocab = function.outputs[1].shape[0]
    tokens = tuple((step * 7 + 1) % vocab for step in range(STEPS))
    with TemporaryDirectory(prefix="castiron-") as folder:
        model, weights = Path(folder) / MODEL, Path(folder) / WEIGHTS
        compile_mlir(print_module(module), target, model)
        write_parameters(weights, checkpoint, module, importance, lambda done: None)
        loaded = Loaded(Part.of(weights).map(), {MODEL: model.read_bytes()}, physical_cores())
        token, position = loaded.zeros((), "i32"), loaded.zeros((), "i32")
        states = [loaded.zeros(state.shape, state.dtype) for state in function.states]
        call, rows = Call(loaded, function.entry, (token, position, *states)), []
        for step, next_token in enumerate(tokens):
            token.words[0], position.words[0] = next_token, step
            call.invoke()
            rows.append(call.floats(1))
    ids = sorted({*(int(row.argmax()) for row in rows), *range(0, vocab, max(1, vocab // IDS))})
    return KnownLogits(tokens, tuple(ids), tuple(tuple(float(value) for value in row[ids]) for row in rows))
