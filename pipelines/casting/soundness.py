"""What no reader of a checkpoint sees and no compiler notices: weights that are no numbers, ids past the vocabulary, and
tokenizers that end the process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from castiron.emitter.codecs import are_finite
from castiron.emitter.shown import shown_text
from castiron.pipelines.casting import tokenizer_trial
from castiron.pipelines.checkpoints import Checkpoint, CheckpointError


@contextmanager
def sound(checkpoint: Checkpoint, vocab: int) -> Iterator[None]:
    """CheckpointError, after the block, for what would be compiled and could not be run. Beside the block the tokenizer is
    tried."""
    with Trial(checkpoint) as trial:
        yield
        tokens = [("bos_token_id", checkpoint.bos_token_id), *(("eos_token_id", eos) for eos in checkpoint.eos_token_ids)]
        for key, token in tokens:
            if token is not None and not 0 <= token < vocab:
                raise CheckpointError(
                    f"{checkpoint.path}: {key} is {shown_text(str(token))}, outside the vocabulary of {vocab}"
                )
        for tensor in checkpoint.tensors.values():
            if not are_finite(tensor.codec, tensor.data):
                raise CheckpointError(
                    f"{checkpoint.path}: {shown_text(tensor.name)} holds infinities or what is no number: fetch it again"
                )
        trial.check(vocab)


class Trial:
    """The checkpoint's tokenizer is read by another process, from the beginning of the block on."""

    def __init__(self, checkpoint: Checkpoint):
        self.path, self.text = checkpoint.path, b""
        try:
            if checkpoint.tokenizer is not None:
                self.text = json.dumps(checkpoint.tokenizer, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            raise CheckpointError(f"{self.path} has a tokenizer that is nested too deep or no UTF-8: fetch it again") from None

    def __enter__(self) -> Trial:
        self.process = None
        if self.text:
            # -P: the modules beside it are castiron's and not the library's.
            command = [sys.executable, "-P", str(Path(tokenizer_trial.__file__))]
            with tempfile.TemporaryFile() as file:
                file.write(self.text)
                file.seek(0)
                self.process = subprocess.Popen(command, stdin=file, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def check(self, vocab: int) -> None:
        """CheckpointError for a tokenizer that cannot be read, ends its process or gives ids past the vocabulary."""
        if self.process is None:
            return
        try:
            found = json.loads(self.process.communicate(timeout=6 * tokenizer_trial.SECONDS)[0])
        except (ValueError, subprocess.TimeoutExpired):
            raise CheckpointError(f"{self.path} has a tokenizer that the tokenizers library fails on: fetch it again") from None
        if "error" in found:
            raise CheckpointError(
                f"{self.path} has no tokenizer that can be read ({shown_text(found['error'])}): fetch it again"
            )
        if found["largest"] >= vocab:
            raise CheckpointError(f"{self.path} has a tokenizer of other tokens: one is {found['largest']}, of {vocab} in all")
