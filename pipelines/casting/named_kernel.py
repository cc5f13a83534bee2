"""One kernel by its name and its shape, without a model: what `castiron emit --kernel` prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from castiron.emitter.codecs import codec_of
from castiron.emitter.kernels.kernel import Kernel
from castiron.emitter.kernels.products import gemm_few
from castiron.emitter.kernels.products.choosing import kernel_of, numerics_of
from castiron.emitter.kernels.products.product import FAST, PIECES, Product
from castiron.emitter.kernels.recurrent.causal_conv import causal_conv
from castiron.emitter.kernels.recurrent.gated_delta import gated_delta
from castiron.emitter.kernels.recurrent.selective_scan import selective_scan
from castiron.emitter.kernels.recurrent.tokens import Columns, Tokens
from castiron.emitter.kernels.round_x import round_x
from castiron.emitter.kernels.split_x import split_x
from castiron.emitter.kernels.weights.packing import LANES, packed_shape
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.emitter.lowering import NUMERICS, lower
from castiron.emitter.models import build
from castiron.emitter.types import EmitError
from castiron.pipelines.errors import PipelineError


@dataclass(frozen=True)
class Asked:
    """What a kernel is asked for; `sizes` are the numbers of --shape."""

    sizes: tuple[int, ...]
    tokens: int
    codec: str
    isa: str
    threads: int
    context: int
    numerics: str
    cache: str


@dataclass(frozen=True)
class Kind:
    """A kernel that can be asked for.

    shape: the words of --shape, as the help has them. example: such a shape. tokens: the default, least and most of
    --tokens. make: the kernel.
    """

    shape: str
    example: str
    tokens: tuple[int, int, int | None]
    make: Callable[[str, Asked], Kernel]

    @property
    def is_product(self) -> bool:
        return self.make is _product

    @property
    def tokens_words(self) -> str:
        default, least, most = self.tokens
        if most == least:
            return str(least)
        return f"{least} and up (default {default})" if most is None else f"{least} to {most} (default {default})"


def _product(name: str, asked: Asked) -> Kernel:
    *experts, out, inner = asked.sizes
    product, isa = Product(asked.codec, asked.tokens, out, inner, experts=experts[0] if experts else 0), ISAS[asked.isa]
    fast = asked.numerics == "fast"
    if asked.numerics == "canonical":
        isa = isa.in_canonical_form
    product = replace(product, numerics=numerics_of(product, isa, fast))
    if fast and product.numerics not in FAST:
        of = f"{product.tokens} tokens, {product.experts} experts and {product.codec}"
        raise ValueError(f"no kernel of {isa.name} rounds x for {of}")
    return kernel_of(product, isa, asked.threads)


def _round_x(name: str, asked: Asked) -> Kernel:
    # A codec of floats takes no bytes; what is made for most is shown then.
    codec = asked.codec if codec_of(asked.codec).quantised else "q4_1"
    packed_shape(codec, LANES, asked.sizes[0])
    return round_x(asked.tokens, asked.sizes[0], codec_of(codec), isa=ISAS[asked.isa])


def _split_x(name: str, asked: Asked) -> Kernel:
    count = PIECES["matrix" if asked.numerics == "fast" else "pieces"]
    codec = codec_of(asked.codec)
    group = codec.group if codec.minimum and count > 1 else 0
    return split_x(asked.tokens, asked.sizes[0], count, group, isa=ISAS[asked.isa])


def _recurrent(name: str, asked: Asked) -> Kernel:
    """Of one layer, whose operands stand apart."""
    tokens, isa = Tokens(asked.tokens, 1, length=asked.tokens > 1), ISAS[asked.isa]
    if name == "causal_conv":
        features, positions = asked.sizes
        return causal_conv(tokens, features, positions, Columns(features), isa=isa)
    groups, heads, inner, outer = asked.sizes
    if heads % groups:
        raise ValueError(f"{heads} heads are no multiple of {groups}")
    if name == "gated_delta":
        widths = {"q": groups * inner, "k": groups * inner, "v": heads * outer, "alpha": heads, "beta": heads}
        return gated_delta(tokens, asked.sizes, {name: Columns(width) for name, width in widths.items()}, isa=isa)
    widths = {"x": heads * inner, "dt": heads, "B": groups * outer, "C": groups * outer}
    return selective_scan(tokens, asked.sizes, {name: Columns(width) for name, width in widths.items()}, isa=isa)


def _of_model(function: str, model_type: str, *keys: str) -> Callable[[str, Asked], Kernel]:
    """From a model of one layer whose config has the sizes under `keys`: the first kernel of that name in a function.

    function: whose kernel it is where there are several tokens; for one it is that of decode_step.
    """

    def make(name: str, asked: Asked) -> Kernel:
        config = {
            "model_type": model_type, "vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": asked.context,
            **dict(zip(keys, asked.sizes)),
        }  # fmt: skip
        tokens = asked.tokens
        some = {kind: (tokens,) if function == kind and tokens > 1 else () for kind in ("prefill", "verify", "decode_batch")}

        def codec(weight: str) -> str:
            return asked.codec if "embed_tokens" in weight else "f32"

        model = build(config, codec, asked.context, some["prefill"], some["verify"], some["decode_batch"], cache=asked.cache)
        lowered = lower(model, "kernels", asked.isa, asked.threads)
        chosen = lowered.functions[f"{function}_{tokens}" if tokens > 1 else "decode_step"]
        kernels = (op.attrs["kernel"] for op in chosen.ops if op.kind == "kernel")
        return next(kernel for kernel in kernels if kernel.name.startswith(f"{name}_"))

    return make


HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim")
FEW = gemm_few.MOST_TOKENS

KINDS: dict[str, Kind] = {
    "gemv": Kind("OUTxIN", "1536x576", (1, 1, 1), _product),
    "gemm_few": Kind("OUTxIN", "1536x576", (4, 2, FEW), _product),
    "gemm": Kind("OUTxIN", "1536x576", (128, FEW + 1, None), _product),
    "experts": Kind("EXPERTSxOUTxIN", "32x768x2048", (4, 1, None), _product),
    "attention_decode": Kind("HEADSxKV_HEADSxHEAD_DIM", "9x3x64", (1, 1, None), _of_model("decode_batch", "llama", *HEADS)),
    "attention_prefill": Kind("HEADSxKV_HEADSxHEAD_DIM", "9x3x64", (128, 2, None), _of_model("prefill", "llama", *HEADS)),
    "rope_append": Kind("HEADSxKV_HEADSxHEAD_DIM", "9x3x64", (128, 2, None), _of_model("prefill", "llama", *HEADS)),
    "causal_conv": Kind("FEATURESxPOSITIONS", "6144x4", (1, 1, None), _recurrent),
    "gated_delta": Kind("K_HEADSxHEADSxK_DIMxV_DIM", "16x16x128x128", (1, 1, None), _recurrent),
    "selective_scan": Kind("GROUPSxHEADSxHEAD_DIMxN", "1x48x64x128", (1, 1, None), _recurrent),
    # Families whose decode_step has such a norm that no product takes in.
    "rms_norm": Kind("HIDDEN", "576", (128, 1, None), _of_model("prefill", "olmo2", "hidden_size")),
    "layer_norm": Kind("HIDDEN", "576", (128, 1, None), _of_model("prefill", "starcoder2", "hidden_size")),
    "embed": Kind("VOCABxHIDDEN", "49152x576", (1, 1, None), _of_model("prefill", "llama", "vocab_size", "hidden_size")),
    "round_x": Kind("IN", "576", (128, 1, None), _round_x),
    "split_x": Kind("IN", "576", (128, 1, None), _split_x),
    "argmax": Kind("VOCAB", "49152", (1, 1, None), _of_model("verify", "llama", "vocab_size")),
}


def named_kernel(
    name: str,
    shape: str,
    *,
    tokens: int | None = None,
    codec: str = "f32",
    isa: str = "avx2",
    threads: int = 2,
    context: int = 8192,
    numerics: str = "exact",
    cache: str = "f32",
) -> Kernel:
    """The kernel `name` (a key of KINDS) that a model of these sizes has, with the default tiles.

    shape: its numbers joined by `x`. tokens: rows of x; of attention_decode sequences, of experts pairs of a token and
    an expert. codec: of the weight, where there is one. context, cache: positions and elements of the cache, where there is
    one. numerics: of a product.
    PipelineError, one sentence, for whatever does not fit.
    """
    kind = KINDS.get(name)
    if kind is None:
        raise PipelineError(f"kernel {name!r} is not one of {', '.join(KINDS)}")
    words = shape.split("x")
    if len(words) != len(kind.shape.split("x")) or not all(w.isascii() and w.isdigit() and int(w) for w in words):
        raise PipelineError(f"shape {shape!r} does not fit {name}: --shape takes {kind.shape}, such as {kind.example}")
    default, least, most = kind.tokens
    tokens = default if tokens is None else tokens
    if tokens < least or (most is not None and tokens > most):
        raise PipelineError(f"{name} does not take {tokens} tokens: --tokens takes {kind.tokens_words}")
    if numerics not in NUMERICS:
        raise PipelineError(f"numerics {numerics!r} are unknown: use {', '.join(NUMERICS)}")
    if numerics != "exact" and not (kind.is_product or kind.make is _split_x):
        raise PipelineError(f"{name} is no product and has no numerics but exact: leave --numerics out")
    try:
        asked = Asked(tuple(map(int, words)), tokens, codec, isa, threads, max(context, tokens), numerics, cache)
        return kind.make(name, asked)
    except (ValueError, EmitError) as error:
        raise PipelineError(f"{name} of shape {shape}: {error}") from None
