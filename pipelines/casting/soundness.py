"""What no reader of a checkpoint sees and no compiler notices: weights that are no numbers, ids past the vocabulary, and
tokenizers that end the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from castiron.emitter.codecs import are_finite
from castiron.emitter.shown import shown_text
from castiron.pipelines.checkpoints import Checkpoint, CheckpointError
from castiron.pipelines.generation.trial import Trial, tokenizer_bytes


@contextmanager
def sound(checkpoint: Checkpoint, vocab: int) -> Iterator[None]:
    """CheckpointError, after the block, for what would be compiled and could not be run. Beside the block the tokenizer is
    tried."""
    tokenizer = b"" if checkpoint.tokenizer is None else tokenizer_bytes(checkpoint.tokenizer, checkpoint.path)
    with Trial(tokenizer, vocab) as trial:
        yield
        tokens = [("bos_token_id", checkpoint.bos_token_id), *(("eos_token_id", eos) for eos in checkpoint.eos_token_ids)]
        for key, token in tokens:
            if token is not None and not 0 <= token < vocab:
                raise CheckpointError(
                    f"{checkpoint.path}: {key} is {shown_text(str(token))}, outside the vocabulary of {vocab}"
                )
        check_finite(checkpoint)
        if fault := trial.fault():
            raise CheckpointError(f"{checkpoint.path} has {fault}: fetch it again")


def check_finite(checkpoint: Checkpoint) -> None:
    """CheckpointError for weights that are no numbers."""
    for tensor in checkpoint.tensors.values():
        if not are_finite(tensor.codec, tensor.data):
            raise CheckpointError(
                f"{checkpoint.path}: {shown_text(tensor.name)} holds infinities or what is no number: fetch it again"
            )
