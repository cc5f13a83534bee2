"""A small random HF model next to our graph of it, through the interpreter: logits at every
position, and greedy tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.emitter.ir import Module
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from castiron.emitter.step import ModelModule
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, missing_and_left_over
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.weights import pack_parameter
from castiron.reference import hf, interpreter
from castiron.reference.tiny import tiny_model

# Prompts of the check go past the windows of tiny models (24) and past several chunks of either width.
CONTEXT, WIDTHS, LENGTH = 64, (4, 16), 44
# f32 sums in another order, as a share of the largest logit: measured up to 6e-6 over all families.
TOLERANCE = 3e-5


class Model:
    """Our graph of a checkpoint, run by the interpreter, with its caches."""

    def __init__(self, checkpoint: Checkpoint, module: Module) -> None:
        self.module = module
        self.params = {p.name: pack_parameter(checkpoint, p) for p in module.params.values()}
        self.states = next(iter(module.functions.values())).states
        self.reset()

    def reset(self) -> None:
        """Forget every position.

        What lies in the caches past a position must never matter, so they start as noise.
        """
        noise = [np.random.default_rng(i).normal(size=s.shape).astype(np.float32) for i, s in enumerate(self.states)]
        self.caches = [n * (s.kind != "recurrent") for n, s in zip(noise, self.states)]
        self.position = 0

    def step(self, token: int) -> tuple[int, np.ndarray]:
        """Argmax and logits [vocab] after one more token."""
        return self._run("decode_step", np.int32(token), np.int32(self.position), advance=1)

    def prefill(self, tokens: Sequence[int], width: int) -> tuple[int, np.ndarray]:
        """Argmax and logits [vocab] after `tokens`, in chunks of `width` of which the last is
        padded.
        """
        for start in range(0, len(tokens), width):
            chunk = np.zeros(width, np.int32)
            real = np.asarray(tokens[start : start + width], np.int32)
            chunk[: len(real)] = real
            result = self._run(f"prefill_{width}", chunk, np.int32(self.position), np.int32(len(real)), advance=len(real))
        return result

    def _run(self, function: str, *inputs: np.ndarray, advance: int) -> tuple[int, np.ndarray]:
        argmax, logits, *self.caches = interpreter.run(self.module, function, [*inputs, *self.caches], self.params)
        self.position += advance
        return int(argmax), logits


@dataclass
class Pair:
    """HF's model and the checkpoint that ours is built from."""

    oracle: object
    checkpoint: Checkpoint

    def layers(self, context: int = CONTEXT, widths: Sequence[int] = WIDTHS) -> ModelModule:
        """Our graph as layer operations; it calls for exactly the checkpoint's tensors."""
        module = build(self.checkpoint.config, self._codec, context, widths)
        required = {w.name: w.shape for w in module.weights.values() if w.values is None}
        assert not missing_and_left_over(required, self.checkpoint)
        return module

    def prefill(self, width: int = LENGTH) -> ModelModule:
        """Our graph's prefill of one width alone."""
        module = self.layers(widths=(width,))
        del module.functions["decode_step"]
        return module

    def ours(self, lowering: str = "portable") -> Model:
        """Our model, as `lowering` makes it."""
        return Model(self.checkpoint, lower(self.layers(), lowering))

    def _codec(self, name: str) -> str:
        tensor = self.checkpoint.tensors.get(name)
        return tensor.codec if tensor else "f32"


def pair(model_type: str, directory: Path, seed: int = 0, **config) -> Pair:
    """A tiny random model of this type, as `castiron.reference.tiny` makes it, in `directory`; one
    that was made before is given again, as it is where it was, and nobody changes it.
    """
    key = repr((model_type, seed, sorted(config.items())))
    if key not in _MADE:
        tiny_model(model_type, directory, seed=seed, **config)
        # On matrices this small a second thread only waits.
        _MADE[key] = Pair(hf.load(directory, threads=1), open_checkpoint(directory))
    return _MADE[key]


_MADE: dict[str, Pair] = {}


def prompt(vocab: int, length: int = LENGTH, seed: int = 7) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


@dataclass
class Agreement:
    """error: largest difference of a logit, as a share of the largest logit.

    margin: smallest lead of the top logit over the second, as the same share.
    """

    error: float = 0.0
    margin: float = float("inf")

    def add(self, logits: np.ndarray, expected: np.ndarray, margin: float | None = None) -> None:
        """Take in the logits of one position and HF's; both must have their maximum at the same
        token.
        """
        scale = float(np.abs(expected).max())
        top = np.sort(expected)[-2:]
        self.error = max(self.error, float(np.abs(logits - expected).max()) / scale)
        self.margin = min(self.margin, float(top[1] - top[0]) / scale)
        assert int(np.argmax(logits)) == int(np.argmax(expected))

    def check(self) -> None:
        """The difference is rounding, and the margins are far above it."""
        assert self.error < TOLERANCE
        assert self.margin > 10 * self.error
