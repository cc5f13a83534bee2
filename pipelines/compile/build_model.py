"""Build the graph of a checkpoint's model, and lower it to StableHLO and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from castiron.emitter.graph.ir import Module
from castiron.emitter.kernels.mlir.isa import ISAS
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.lowering import lower
from castiron.emitter.models import build, read_config
from castiron.emitter.shorten import shorten_list
from castiron.pipelines.checkpoints.adapter import merge, open_adapter
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, missing_and_left_over
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.compile_options import Options, Progress, context_of, max_context_of
from castiron.pipelines.compile.tile_store import TileFields, tiles_for
from castiron.pipelines.compile.weight_codecs import codecs_of
from castiron.vmfb.targets import Target, resolve

# Tokens per call of the encode functions, for causal and for bidirectional attention. Bidirectional
# attention encodes a text in one call, so it also has a function for the longest text.
ENCODE_WIDTHS, SINGLE_CALL_WIDTHS = (32, 128), (32, 128, 512, 2048)


def open_source(model: str | Path, options: Options, progress: Progress | None = None) -> Checkpoint:
    """Open a checkpoint to compile; merge the adapter `options.adapter` into its weights."""
    checkpoint = open_checkpoint(model, progress, options.ignore_keys)
    return merge(checkpoint, open_adapter(Path(options.adapter))) if options.adapter else checkpoint


@dataclass(frozen=True)
class EncoderSizes:
    """Sizes, in tokens, of the functions that encode texts for embedding or reranking.

    context: positions of the KV cache. max_tokens: of a text.
    single_call: whether a text is encoded in one call, because attention is bidirectional.
    """

    context: int
    widths: tuple[int, ...]
    max_tokens: int
    single_call: bool


def encoder_sizes(checkpoint: Checkpoint, options: Options) -> EncoderSizes | None:
    """Return the sizes of an encoder's functions; None if the model generates text."""
    if checkpoint.encoding is None:
        return None
    config, context = read_config(checkpoint.config), context_of(checkpoint.config, options)
    max_tokens = min(context, checkpoint.encoding.max_tokens or context)
    if config.bidirectional:
        widths = {max_tokens, *(width for width in options.embed or SINGLE_CALL_WIDTHS if width < max_tokens)}
        return EncoderSizes(max_tokens, tuple(sorted(widths)), max_tokens, True)
    widths = tuple(width for width in options.embed or ENCODE_WIDTHS if width <= context) or (context,)
    # The last call is padded to its width, and the padding takes positions of the states.
    padded = -(-max_tokens // max(widths)) * max(widths)
    if padded > config.max_positions:
        padded = config.max_positions // max(widths) * max(widths)
    return EncoderSizes(padded, widths, min(max_tokens, padded), False)


def build_model(checkpoint: Checkpoint, options: Options) -> ModelModule:
    """Return the graph of a model; CheckpointError if a tensor is missing or unknown."""
    codecs = codecs_of(checkpoint, options.weights, options.requantise)
    codec, cache, orders = lambda name: codecs.get(name, "f32"), options.kv_cache_type, checkpoint.column_orders
    if sizes := encoder_sizes(checkpoint, options):
        pooling = checkpoint.encoding.pooling if checkpoint.encoding else None
        module = build(
            checkpoint.config, codec, sizes.context, (), embeds=sizes.widths, cache=cache, pooling=pooling, orders=orders
        )
    else:
        context, positions = context_of(checkpoint.config, options), max_context_of(checkpoint.config, options)
        prefill, verify, embed = (
            [w for w in of if w <= context] for of in (options.prefill, options.verify_widths, options.embed)
        )
        module = build(checkpoint.config, codec, positions, prefill, verify, options.batch, embed, cache, orders=orders)
    required = {w.name: w.shape for w in module.weights.values() if w.values is None}
    if problems := missing_and_left_over(required, checkpoint):
        # List missing and left-over names, because left-over names often explain the missing ones.
        kinds = [[problem for problem in problems if problem.endswith(" is left over") == left] for left in (False, True)]
        limit = 180 // sum(map(bool, kinds))
        listed = "; ".join(shorten_list(kind, "; ", limit) for kind in kinds if kind)
        raise CheckpointError(
            f"tensors of {checkpoint.path} do not match its config: {listed}; use the config and all tensors of one model"
        )
    return module


def build_module(
    checkpoint: Checkpoint, options: Options, target: Target | None = None, tuned: TileFields = MappingProxyType({})
) -> Module:
    """Return the model lowered for `target`, by default that of the options, with `tuned` tiles."""
    # A GPU has no instruction set of castiron's kernels, and its lowering reads none.
    isa, threads = (target or resolve(options.target)).isa or "avx2", options.threads_or_cores
    tiles = lambda matmul: tiles_for(matmul, tuned, ISAS[isa], threads)
    return lower(build_model(checkpoint, options), options.lowering, isa, threads, tiles, options.numerics)
