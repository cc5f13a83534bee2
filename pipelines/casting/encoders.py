"""What a model that encodes texts is compiled for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from castiron.emitter.models import attends_both_ways, family
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, Encoding
from castiron.vmfb.manifest import Encoder

# Tokens that a call takes which encodes a part of a text; of a model that takes a text whole, a call of less than the longest.
ENCODE_WIDTHS, WHOLE_WIDTHS = (32, 128), (32, 128, 512, 2048)


@dataclass(frozen=True)
class EncoderSizes:
    """context: positions of the states. widths: of the encode functions. most: tokens of a text. whole: in one call."""

    context: int
    widths: tuple[int, ...]
    most: int
    whole: bool


def encoder_sizes(checkpoint: Checkpoint, context: int, asked: Sequence[int]) -> EncoderSizes | None:
    """What an encoder is compiled for, in a context of at most so many positions and with the widths asked for, if any were;
    None for a model that generates."""
    if checkpoint.encoding is None:
        return None
    c = family(checkpoint.config).Config.read(checkpoint.config)
    most = min(context, checkpoint.encoding.max_tokens or context)
    if attends_both_ways(c):
        widths = tuple(sorted({most, *(w for w in asked or WHOLE_WIDTHS if w < most)}))
        return EncoderSizes(most, widths, most, True)
    widths = tuple(width for width in asked or ENCODE_WIDTHS if width <= context) or (context,)
    # Padding of the last call takes rows too.
    whole = -(-most // max(widths)) * max(widths)
    if whole > c.max_positions:
        whole = c.max_positions // max(widths) * max(widths)
    return EncoderSizes(whole, widths, min(most, whole), False)


def encoder_facts(encoding: Encoding, sizes: EncoderSizes) -> Encoder:
    """What the manifest says of it."""
    pooling = encoding.pooling
    return Encoder(
        pooling.mode, pooling.normalised, sizes.whole, sizes.most, tuple(dense.features for dense in pooling.dense),
        dict(encoding.prompts), encoding.default_prompt, encoding.lower_case,
        encoding.relevance, encoding.types,
    )  # fmt: skip
