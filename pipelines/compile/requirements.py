"""Compute the disk space and memory that a checkpoint's bundle will need."""

from __future__ import annotations

from dataclasses import dataclass

from castiron.emitter.abi import State
from castiron.pipelines.checkpoints.checkpoint import Checkpoint
from castiron.pipelines.compile.build_model import build_module
from castiron.pipelines.compile.options import Options, context_of, max_context_of


@dataclass(frozen=True)
class Requirements:
    """What a bundle with the default options needs.

    weights: bytes of the packed weights, on disk and mapped into memory. largest: bytes of the
    largest weight, which packing needs in memory. states: the states of a sequence, with space for
    `max_context` positions. context: number of positions that are used by default.
    """

    weights: int
    largest: int
    states: tuple[State, ...]
    context: int
    max_context: int


def requirements_of(checkpoint: Checkpoint) -> Requirements:
    """Return the needs of a checkpoint's bundle, before it is compiled.

    Raises EmitError or CheckpointError for a checkpoint that cannot be compiled.
    """
    # Other functions read the same weights and states.
    options = Options(prefill=(), batch=(), speculate=())
    module = build_module(checkpoint, options)
    sizes = [param.type.nbytes for param in module.params.values()]
    states, config = next(iter(module.functions.values())).states, checkpoint.config
    return Requirements(sum(sizes), max(sizes), states, context_of(config, options), max_context_of(config, options))
