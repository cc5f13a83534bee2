"""A small random HF model and our graph of it, which the interpreter runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from castiron.emitter.graph.ir import Module
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.lowering import lower
from castiron.emitter.models import build
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, missing_and_left_over
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.weight_codecs import pack_parameter
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
        """Start at position 0, with noise in the caches, which must not matter."""
        noise = [np.random.default_rng(i).normal(size=s.shape).astype(np.float32) for i, s in enumerate(self.states)]
        self.caches = [n * (s.kind != "recurrent") for n, s in zip(noise, self.states)]
        self.position = 0

    def step(self, token: int) -> tuple[int, np.ndarray]:
        """Return the argmax and logits [vocab] after one more token."""
        return self._run("decode_step", np.int32(token), np.int32(self.position), advance=1)

    def prefill(self, tokens: Sequence[int], width: int) -> tuple[int, np.ndarray]:
        """Return argmax and logits [vocab] after `tokens`, in chunks of `width`, the last padded."""
        for start in range(0, len(tokens), width):
            chunk = np.zeros(width, np.int32)
            real = np.asarray(tokens[start : start + width], np.int32)
            chunk[: len(real)] = real
            result = self._run(f"prefill_{width}", chunk, np.int32(self.position), np.int32(len(real)), advance=len(real))
        return result

    def _run(self, function: str, *inputs: np.ndarray, advance: int) -> tuple[int, np.ndarray]:
        argmax, logits = self.call(function, *inputs)
        self.position += advance
        return int(argmax), logits

    def call(self, function: str, *inputs: np.ndarray) -> list[np.ndarray]:
        """Run a function, update the caches, and return its other results."""
        results = interpreter.run(self.module, function, [*inputs, *self.caches], self.params)
        count = len(results) - len(self.caches)
        self.caches = results[count:]
        return results[:count]


@dataclass
class Pair:
    """HF's model, and the checkpoint from which ours is built."""

    oracle: object
    checkpoint: Checkpoint

    def layers(self, context: int = CONTEXT, widths: Sequence[int] = WIDTHS, **functions) -> ModelModule:
        """Return our graph as layer operations, which reads exactly the checkpoint's tensors."""
        orders = self.checkpoint.column_orders
        module = build(self.checkpoint.config, self._codec, context, widths, **functions, orders=orders)
        required = {w.name: w.shape for w in module.weights.values() if w.values is None}
        assert not missing_and_left_over(required, self.checkpoint)
        return module

    def prefill(self, width: int = LENGTH) -> ModelModule:
        """Return the graph of one prefill function."""
        module = self.layers(widths=(width,))
        del module.functions["decode_step"]
        return module

    def ours(self, lowering: str = "portable") -> Model:
        """Return our model after `lowering`."""
        return Model(self.checkpoint, lower(self.layers(), lowering))

    def _codec(self, name: str) -> str:
        tensor = self.checkpoint.tensors.get(name)
        return tensor.codec if tensor else "f32"


def pair(model_type: str, directory: Path, seed: int = 0, **config) -> Pair:
    """Return a tiny random model, which is written to `directory` unless one is in memory."""
    key = repr((model_type, seed, sorted(config.items())))
    if key not in _MADE:
        tiny_model(model_type, directory, seed=seed, **config)
        # On matrices this small a second thread only waits.
        _MADE[key] = Pair(hf.load(directory, threads=1), open_checkpoint(directory))
    return _MADE[key]


_MADE: dict[str, Pair] = {}


def prompt(vocab: int, length: int = LENGTH, seed: int = 7) -> list[int]:
    """Return random tokens."""
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


@dataclass
class Agreement:
    """The largest error of a logit and the smallest margin, as shares of the largest logit."""

    error: float = 0.0
    margin: float = float("inf")

    def add(self, logits: np.ndarray, expected: np.ndarray) -> None:
        """Add the logits of one position and HF's, which must have the same argmax."""
        scale = float(np.abs(expected).max())
        top = np.sort(expected)[-2:]
        self.error = max(self.error, float(np.abs(logits - expected).max()) / scale)
        self.margin = min(self.margin, float(top[1] - top[0]) / scale)
        assert int(np.argmax(logits)) == int(np.argmax(expected))

    def check(self) -> None:
        """Assert that the error is rounding, and the margins far above it."""
        assert self.error < TOLERANCE
        assert self.margin > 10 * self.error


def check_rows(logits: np.ndarray, expected: Sequence[np.ndarray]) -> None:
    """Compare logits [positions, vocab] with HF's."""
    agreement = Agreement()
    for row, wanted in zip(logits, expected, strict=True):
        agreement.add(row, wanted)
    agreement.check()


def assert_same_logits(ours: Model, tokens: Sequence[int], expected: np.ndarray, steps: int = 2) -> None:
    """Compare logits with HF's [tokens, vocab] after a prefill and the last `steps` tokens."""
    agreement, start = Agreement(), len(tokens) - steps
    ours.reset()
    agreement.add(ours.prefill(tokens[:start], WIDTHS[1])[1], expected[start - 1])
    for position in range(start, len(tokens)):
        argmax, logits = ours.step(tokens[position])
        assert argmax == int(expected[position].argmax())
        agreement.add(logits, expected[position])
    agreement.check()
