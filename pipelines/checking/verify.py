"""Greedy tokens of a bundle against HF transformers' own reading of the same checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.text import load_text
from castiron.pipelines.hub_name import HubName
from castiron.vmfb.bundle import Bundle

if TYPE_CHECKING:
    from castiron.pipelines.checkpoints import Checkpoint

DEFAULT_PROMPTS = "verify_prompts.jsonl"
# Above this margin between its two largest logits, HF chooses the same token whether it reads a text at once or token by
# token: those two differ by rounding alone, by some 1e-5.
CERTAIN = 2e-3
# Prompts for a bundle without tokenizer: lengths around and between the borders of prefill chunks.
DRAWN_LENGTHS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 300, 1000)


@dataclass(frozen=True)
class Prompt:
    """Text, in the chat template unless `raw`, or token ids."""

    name: str
    text: str = ""
    raw: bool = False
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """One prompt's tokens, and where they first differ (None: nowhere) from those of HF.

    margins are HF's: by how much each token's logit was above the second largest. What HF expects after the first
    difference means nothing.
    """

    prompt: Prompt
    prompt_tokens: int
    tokens: list[int]
    expected: list[int]
    margins: list[float]

    @property
    def first_difference(self) -> int | None:
        pairs = zip(self.tokens, self.expected, strict=True)
        return next((index for index, (ours, theirs) in enumerate(pairs) if ours != theirs), None)

    def as_json(self) -> dict:
        at = self.first_difference
        return {
            "name": self.prompt.name,
            "prompt_tokens": self.prompt_tokens,
            "exact": at is None,
            "first_difference": at,
            "castiron": None if at is None else self.tokens[at],
            "hf": None if at is None else self.expected[at],
            "hf_margin": None if at is None else self.margins[at],
            "smallest_hf_margin": min(self.margins[: None if at is None else at + 1]),
            "tokens": self.tokens,
        }


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """The prompts of a file, by default those that castiron ships.

    A line is a prompt, or, if it starts with {, an object with "prompt" or "tokens", and optionally "name" and "raw".
    PipelineError for a file without prompts or a line that is neither.
    """
    lines = (
        (Path(path) if path else files("castiron.pipelines.checking") / DEFAULT_PROMPTS).read_text(encoding="utf-8").split("\n")
    )
    prompts = [_prompt(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise PipelineError(f"{path} has no prompts: write one a line")
    return prompts


def _prompt(line: str, where: str) -> Prompt:
    if not line.startswith("{"):
        return Prompt(line[:40], line)
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PipelineError(f"{where} starts with {{ but is not JSON ({error})") from None
    text, tokens = value.get("prompt"), value.get("tokens")
    unknown = sorted(set(value) - {"name", "prompt", "tokens", "raw"})
    sound = isinstance(text, str) and text if tokens is None else _are_ids(tokens) and text is None
    if unknown or not sound:
        what = f"has the unknown key {unknown[0]!r}" if unknown else 'needs "prompt", a text, or "tokens", a list of ids'
        raise PipelineError(f"{where} {what}")
    name = str(value.get("name") or (text[:40] if text else f"{len(tokens)} tokens"))
    return Prompt(name, text or "", value.get("raw") is True, tuple(tokens or ()))


def _are_ids(value) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def drawn_prompts(vocab: int) -> list[Prompt]:
    """Token ids drawn from the whole vocabulary with a fixed seed, for bundles without a tokenizer."""
    random = np.random.default_rng(0)
    return [
        Prompt(f"{length} drawn tokens", tokens=tuple(int(token) for token in random.integers(vocab, size=length)))
        for length in DRAWN_LENGTHS
    ]


def encoded_prompts(
    bundle: Bundle, path: str | None = None, given: Sequence[Prompt] | None = None
) -> list[tuple[Prompt, list[int]]]:
    """The prompts `given`, else those of the file `path`, else castiron's own for a bundle with a tokenizer or without, each
    with its ids."""
    vocab, text = bundle.manifest.vocab, load_text(bundle) if bundle.tokenizer else None
    prompts = given or (read_prompts(path) if path or text else drawn_prompts(vocab))
    return [(prompt, encode(prompt, text, vocab)) for prompt in prompts]


def encode(prompt: Prompt, text, vocab: int) -> list[int]:
    """The ids of a prompt; `text` is the bundle's Text or None. PipelineError for ids outside the vocabulary."""
    if prompt.tokens:
        if max(prompt.tokens) >= vocab:
            raise PipelineError(
                f"prompt {prompt.name!r} has the token {max(prompt.tokens)}, outside the vocabulary of {vocab} tokens"
            )
        return list(prompt.tokens)
    if text is None:
        raise PipelineError(f"prompt {prompt.name!r} is text and the bundle has no tokenizer: give token ids")
    if prompt.raw or text.chat_template is None:
        return text.encode(prompt.text)
    return text.encode_chat([{"role": "user", "content": prompt.text}])


def checkpoint_of(bundle: Bundle, given: str | None = None, *, any_format: bool = False) -> Path:
    """The checkpoint that the bundle was made from: where `given` says it is, else where it was then.

    PipelineError if it is gone or is another by now, by the hash in the manifest. With `any_format` one of another format
    (a GGUF file of a model that was compiled from a directory) is taken at its word.
    """
    from castiron.pipelines.checkpoints import find_checkpoint
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE, fetch
    from castiron.pipelines.checkpoints.identity import checkpoint_sha256

    source = bundle.manifest.source
    recorded = source.get("path")
    if given is not None:
        path = find_checkpoint(given)
    elif recorded and Path(recorded).exists():
        path = Path(recorded)
    elif source.get("model") in CATALOGUE:
        path = fetch(source["model"])
    elif hub := source.get("hub"):
        path = find_checkpoint(f"hf.co/{HubName(hub['repository'], hub['revision'], hub.get('file'))}")
    else:
        gone = f"{recorded}, is not there any more" if recorded else "which it does not name, is not known"
        raise PipelineError(f"the checkpoint of {bundle.path}, {gone}: say with --checkpoint where it is")
    if any_format and path.is_file() != (source.get("format") == "gguf"):
        return path
    expected = source.get("sha256")
    if expected and checkpoint_sha256(path) != expected:
        raise PipelineError(
            f"{path} is not the checkpoint that {bundle.path} was made from (another sha256): give that one with "
            "--checkpoint, or compile again"
        )
    return path


def text_of(bundle: Bundle) -> Path | None:
    """The text that the bundle's weights were calibrated on; PipelineError if it is gone or another by now."""
    recorded = bundle.manifest.source.get("calibrated")
    if recorded is None:
        return None
    path = Path(recorded["path"])
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != recorded["sha256"]:
        raise PipelineError(f"the text that calibrated {bundle.path}, {path}, is gone or is another by now: compile again")
    return path


def adapter_of(bundle: Bundle) -> Path | None:
    """The adapter in the bundle's weights, where it lay then; PipelineError if it is gone or another by now."""
    from castiron.pipelines.checkpoints.adapter import adapter_sha256

    recorded = bundle.manifest.source.get("adapter")
    if recorded is None:
        return None
    path = Path(recorded["path"])
    if not path.is_dir() or adapter_sha256(path) != recorded["sha256"]:
        raise PipelineError(f"the adapter of {bundle.path}, {path}, is not there any more or is another: compile again with it")
    return path


def load_reference(path: Path, weights: str, threads: int | None, adapter: Path | None = None, calibrated: Path | None = None):
    """HF's model of the checkpoint with the adapter that peft merges into it, its matrices as a bundle with these weights,
    calibrated on that text, stores them, widened again.

    PipelineError if transformers cannot read it, and where it keeps a quantised matrix under another name than the checkpoint.
    """
    # Before transformers is imported: its bar for reading GGUF would break into ours.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from castiron.pipelines.casting.compile import Options, importance_of
    from castiron.pipelines.checkpoints import open_checkpoint
    from castiron.pipelines.checkpoints.adapter import merge, open_adapter
    from castiron.reference import hf

    try:
        model = hf.load(path, threads, adapter)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise PipelineError(f"transformers cannot read {path}, so there is nothing to compare with: {reason}") from None
    if weights != "native" or adapter:
        checkpoint = open_checkpoint(path)
        checkpoint = merge(checkpoint, open_adapter(adapter)) if adapter else checkpoint
        options = Options(weights=weights, adapter=adapter and str(adapter), calibrate=calibrated and str(calibrated))
        _store_as(model, checkpoint, weights, importance_of(checkpoint, options, lambda stage, done: None))
    return model


def _store_as(model, checkpoint: Checkpoint, weights: str, importance: Mapping[str, np.ndarray]) -> None:
    """The model's matrices, in place, as a bundle of the checkpoint stores them."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from castiron.emitter.codecs import dequantise
    from castiron.emitter.quantise import convert
    from castiron.pipelines.casting.weights import FLOATS, QUANTISED, codecs_of

    codecs = codecs_of(checkpoint, weights)
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        codec = weights if weights in FLOATS else codecs.get(name)
        if codec is None and weights not in QUANTISED:
            continue
        if codec is None:
            raise PipelineError(
                f"transformers keeps {name} in a form of its own, which cannot be quantised as the bundle's weights were: "
                "castiron evaluate --against hf measures how far the bundle is from the unquantised model"
            )
        with torch.no_grad():
            values = parameter.numpy().T if name in transposed else parameter.numpy()
            raw = np.ascontiguousarray(values).view(np.uint8)
            stored = torch.from_numpy(dequantise(codec, convert("f32", raw, codec, importance.get(name))))
            parameter.copy_(stored.T if name in transposed else stored)


def expect(model, prompt: list[int], ours: list[int]):
    """HF's greedy tokens after `prompt`, as `hf.Greedy`, right up to and at their first difference from `ours`.

    As long as each of our tokens is the one that HF chooses after those before it, they are HF's greedy tokens, and one
    pass over all of them tells. Where a choice in that pass is too close to call, HF generates token by token instead.
    """
    import torch

    from castiron.reference import hf

    with torch.inference_mode():
        ids = torch.tensor([prompt + ours[:-1]])
        logits = model(ids, use_cache=False, logits_to_keep=len(ours)).logits[0].numpy()
    tokens = [int(token) for token in logits.argmax(-1)]
    margins = [float(largest - second) for second, largest in np.sort(np.partition(logits, -2)[:, -2:])]
    same = next((index for index, pair in enumerate(zip(tokens, ours, strict=True)) if pair[0] != pair[1]), len(ours) - 1)
    if min(margins[: same + 1]) < CERTAIN:
        return hf.greedy(model, prompt, len(ours))
    return hf.Greedy(tokens, margins)


def compare(
    session,
    model,
    prompts: Sequence[tuple[Prompt, list[int]]],
    n: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Comparison]:
    """The comparison of `n` greedy tokens after each prompt, end-of-text tokens passed over on both sides.

    `progress` gets (prompts done, prompts in all).
    """
    for done, (prompt, tokens) in enumerate(prompts):
        if progress:
            progress(done, len(prompts))
        session.rewind(0)
        ours = list(Generation(session, tokens, max_tokens=n, stop_tokens=()))
        theirs = expect(model, tokens, ours)
        yield Comparison(prompt, len(tokens), ours, theirs.tokens, theirs.margins)
    if progress:
        progress(len(prompts), len(prompts))
