"""Make a single kernel by its name, for `castiron emit --kernel` and `castiron bench --kernel`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from castiron.emitter.codecs import codec_of
from castiron.emitter.graph.ir import Module, current_function
from castiron.emitter.graph.stablehlo import LOWERED
from castiron.emitter.graph.types import EmitError
from castiron.emitter.graph.verifier import check
from castiron.emitter.kernels.kernel import Kernel, kernel_call
from castiron.emitter.kernels.matmul.schedule import FEW_TOKENS
from castiron.emitter.kernels.matmul.selection import kernel_of, numerics_of
from castiron.emitter.kernels.matmul_spec import FAST, PIECES, Matmul
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.kernels.quantise_x import quantise_x
from castiron.emitter.kernels.recurrent.causal_conv import causal_conv
from castiron.emitter.kernels.recurrent.gated_delta import gated_delta
from castiron.emitter.kernels.recurrent.selective_scan import selective_scan
from castiron.emitter.kernels.recurrent.tokens import Columns, Tokens
from castiron.emitter.kernels.split_x import split_x
from castiron.emitter.kernels.weights.packing import LANES, packed_shape
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from castiron.pipelines.errors import PipelineError


def kernel_module(kernel: Kernel, storage: bool = False) -> Module:
    """Return a module that runs a kernel once; `storage`: into buffers that are arguments."""
    module = Module("kernel")
    in_place = {**{name: f"{name}_storage" for name in kernel.results if storage}, **kernel.in_place}
    buffers = {operand: kernel.results[name] for name, operand in in_place.items() if operand not in kernel.tensors}
    with module.function("call", **kernel.tensors, **buffers) as inputs:
        values = dict(zip([*kernel.tensors, *buffers], inputs, strict=True))
        results = kernel_call(kernel, **{n: values[n] for n in kernel.tensors}, **dict.fromkeys(kernel.indices, 0))
        current_function().returns({i: values[in_place[name]] for i, name in enumerate(results) if name in in_place}, **results)
    check(module, LOWERED)
    return module


@dataclass(frozen=True)
class KernelRequest:
    """The options of `castiron emit --kernel`; sizes: the numbers of --shape.

    tokens: rows of x. For attention_decode sequences, for experts (token, expert) pairs.
    """

    sizes: tuple[int, ...]
    tokens: int
    codec: str = "f32"
    isa: str = "avx2"
    threads: int = 2
    context: int = 8192
    numerics: str = "exact"
    kv_cache_type: str = "f32"


@dataclass(frozen=True)
class Kind:
    """A kind of kernel; tokens: default, minimum and maximum (None: none) of --tokens."""

    shape: str
    example: str
    tokens: tuple[int, int, int | None]
    make: Callable[[str, KernelRequest], Kernel]

    @property
    def tokens_words(self) -> str:
        default, minimum, maximum = self.tokens
        if maximum == minimum:
            return str(minimum)
        return f"{minimum} and up (default {default})" if maximum is None else f"{minimum} to {maximum} (default {default})"


def _matmul(name: str, asked: KernelRequest) -> Kernel:
    *experts, out, inner = asked.sizes
    matmul, isa = Matmul(asked.codec, asked.tokens, out, inner, experts=experts[0] if experts else 0), ISAS[asked.isa]
    fast = asked.numerics in ("fast", "draft")
    matmul = replace(matmul, numerics=numerics_of(matmul, isa, asked.numerics))
    if fast and matmul.numerics not in FAST:
        case = f"{matmul.tokens} tokens, {matmul.experts} experts and {matmul.codec}"
        raise ValueError(f"--numerics {asked.numerics} has no kernel on {isa.name} for {case}; remove --numerics")
    return kernel_of(matmul, isa, asked.threads)


def _quantise_x(name: str, asked: KernelRequest) -> Kernel:
    # Matmuls of float codecs never read quantised activations, so use the layout that most quantised codecs have.
    codec = asked.codec if codec_of(asked.codec).quantised else "q4_1"
    packed_shape(codec, LANES, asked.sizes[0])
    digits = 1 if asked.numerics in ("fast", "draft") else 3
    return quantise_x(asked.tokens, asked.sizes[0], codec_of(codec), digits, isa=ISAS[asked.isa])


def _split_x(name: str, asked: KernelRequest) -> Kernel:
    count = PIECES["bf16_matrix" if asked.numerics in ("fast", "draft") else "bf16_split"]
    codec = codec_of(asked.codec)
    group = codec.group if codec.minimum and count > 1 else 0
    return split_x(asked.tokens, asked.sizes[0], count, group, isa=ISAS[asked.isa])


def _recurrent(name: str, asked: KernelRequest) -> Kernel:
    tokens, isa = Tokens(asked.tokens, 1, length=asked.tokens > 1), ISAS[asked.isa]
    if name == "causal_conv":
        features, positions = asked.sizes
        return causal_conv(tokens, features, positions, Columns(features), isa=isa)
    groups, heads, inner, outer = asked.sizes
    if heads % groups:
        raise ValueError(f"{heads} heads are not a multiple of {groups} groups; change --shape")
    if name == "gated_delta":
        widths = {"q": groups * inner, "k": groups * inner, "v": heads * outer, "alpha": heads, "beta": heads}
        return gated_delta(tokens, asked.sizes, {name: Columns(width) for name, width in widths.items()}, isa=isa)
    widths = {"x": heads * inner, "dt": heads, "B": groups * outer, "C": groups * outer}
    return selective_scan(tokens, asked.sizes, {name: Columns(width) for name, width in widths.items()}, isa=isa)


def _of_model(function: str, model_type: str, *keys: str) -> Callable[[str, KernelRequest], Kernel]:
    """Return a `Kind.make` that takes a kernel of a model whose config `keys` have the sizes."""

    def make(name: str, asked: KernelRequest) -> Kernel:
        config = {
            "model_type": model_type, "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": asked.context,
            **dict(zip(keys, asked.sizes)),
        }  # fmt: skip
        tokens = asked.tokens
        widths = [(tokens,) if function == kind and tokens > 1 else () for kind in ("prefill", "verify", "decode_batch")]
        codec = lambda weight: asked.codec if "embed_tokens" in weight else "f32"
        model = build(config, codec, asked.context, *widths, cache=asked.kv_cache_type)
        lowered = lower(model, "kernels", asked.isa, asked.threads)
        chosen = lowered.functions[f"{function}_{tokens}" if tokens > 1 else "decode_step"]
        kernels = (op.attrs["kernel"] for op in chosen.ops if op.kind == "kernel")
        return next(kernel for kernel in kernels if kernel.name.startswith(f"{name}_"))

    return make


HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
HEADS_SHAPE = "HEADSxKV_HEADSxHEAD_DIM"
FEW = FEW_TOKENS

KINDS: dict[str, Kind] = {
    "gemv": Kind("OUTxIN", "1536x576", (1, 1, 1), _matmul),
    "gemm_few": Kind("OUTxIN", "1536x576", (4, 2, FEW), _matmul),
    "gemm": Kind("OUTxIN", "1536x576", (128, FEW + 1, None), _matmul),
    "experts": Kind("EXPERTSxOUTxIN", "32x768x2048", (4, 1, None), _matmul),
    "attention_decode": Kind(HEADS_SHAPE, "9x3x64", (1, 1, None), _of_model("decode_batch", "llama", *HEADS)),
    "attention_prefill": Kind(HEADS_SHAPE, "9x3x64", (128, 2, None), _of_model("prefill", "llama", *HEADS)),
    "rope_append": Kind(HEADS_SHAPE, "9x3x64", (128, 2, None), _of_model("prefill", "llama", *HEADS)),
    "causal_conv": Kind("FEATURESxPOSITIONS", "6144x4", (1, 1, None), _recurrent),
    "gated_delta": Kind("K_HEADSxHEADSxK_DIMxV_DIM", "16x16x128x128", (1, 1, None), _recurrent),
    "selective_scan": Kind("GROUPSxHEADSxHEAD_DIMxN", "1x48x64x128", (1, 1, None), _recurrent),
    # The norms come from model families in which they are not fused into a matmul.
    "rms_norm": Kind("HIDDEN", "576", (128, 1, None), _of_model("prefill", "olmo2", "hidden_size")),
    "layer_norm": Kind("HIDDEN", "576", (128, 1, None), _of_model("prefill", "starcoder2", "hidden_size")),
    "embed": Kind("VOCABxHIDDEN", "49152x576", (1, 1, None), _of_model("prefill", "llama", "vocab_size", "hidden_size")),
    "quantise_x": Kind("IN", "576", (128, 1, None), _quantise_x),
    "split_x": Kind("IN", "576", (128, 1, None), _split_x),
    "argmax": Kind("VOCAB", "49152", (1, 1, None), _of_model("verify", "llama", "vocab_size")),
}


def named_kernel(name: str, shape: str, *, tokens: int | None = None, **options: Any) -> Kernel:
    """Return a kernel of a kind, with default tiles; options: other fields of `KernelRequest`."""
    kind = KINDS.get(name)
    if kind is None:
        raise PipelineError(f"unknown kernel: {name!r}; use one of {', '.join(KINDS)}")
    words = shape.split("x")
    if len(words) != len(kind.shape.split("x")) or not all(w.isascii() and w.isdigit() and int(w) for w in words):
        raise PipelineError(f"shape {shape!r} does not fit {name}; --shape takes {kind.shape}, such as {kind.example}")
    if kind.shape == HEADS_SHAPE and (sizes := list(map(int, words)))[0] % sizes[1]:
        problem = f"{sizes[0]} heads are not a multiple of {sizes[1]} kv heads"
        raise PipelineError(f"shape {shape!r} does not fit {name}: {problem}; change --shape")
    default, minimum, maximum = kind.tokens
    tokens = default if tokens is None else tokens
    if tokens < minimum or (maximum is not None and tokens > maximum):
        raise PipelineError(f"{name} does not take {tokens} tokens; --tokens takes {kind.tokens_words}")
    asked = KernelRequest(tuple(map(int, words)), tokens, **options)
    if asked.numerics != "exact" and kind.make not in (_matmul, _split_x, _quantise_x):
        raise PipelineError(f"{name} is not a matmul, so its numerics are exact; leave --numerics out")
    try:
        return kind.make(name, replace(asked, context=max(asked.context, tokens)))
    except (ValueError, EmitError) as error:
        raise PipelineError(f"cannot make a kernel {name} of shape {shape}: {error}") from None
