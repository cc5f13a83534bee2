"""Compare a bundle's greedy tokens with those of HF transformers, which reads the same checkpoint
by itself."""

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

from castiron.pipelines.engine.context import check_free_positions
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.locate import HubName
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle import Bundle

if TYPE_CHECKING:
    from castiron.pipelines.checkpoints.checkpoint import Checkpoint

DEFAULT_PROMPTS = "verify_prompts.jsonl"
# Above this margin between its two largest logits, HF chooses the same token for a complete text as token by token: the
# logits of the two differ by rounding, about 1e-5.
CERTAIN = 2e-3
# Random prompts for a bundle without tokenizer: lengths around and between the sizes of prefill chunks.
RANDOM_LENGTHS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 300, 1000)


@dataclass(frozen=True)
class Prompt:
    """A prompt for castiron and HF: text, in the chat template unless `raw`, or token ids."""

    name: str
    text: str = ""
    raw: bool = False
    tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The tokens of castiron (`tokens`) and of HF (`expected`) after one prompt.

    After the first difference, `expected` is meaningless. margins: for each token, HF's largest
    logit minus the second largest.
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
    """Return the prompts of a file, by default those that castiron ships; PipelineError for an
    invalid file.

    A line is a prompt, or an object with "prompt" or "tokens", and optionally "name" and "raw".
    """
    file = Path(path) if path else files("castiron.pipelines.evaluate") / DEFAULT_PROMPTS
    lines = enumerate(file.read_text(encoding="utf-8").split("\n"), 1)
    prompts = [_prompt(line, f"{path}:{number}") for number, line in lines if line.strip()]
    if not prompts:
        raise PipelineError(f"{path} has no prompts; write one per line")
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
    is_valid = isinstance(text, str) and text if tokens is None else _are_ids(tokens) and text is None
    if unknown or not is_valid:
        what = f"has the unknown key {unknown[0]!r}" if unknown else 'needs "prompt", a text, or "tokens", a list of ids'
        raise PipelineError(f"{where} {what}")
    name = str(value.get("name") or (text[:40] if text else f"{len(tokens)} tokens"))
    return Prompt(name, text or "", value.get("raw") is True, tuple(tokens or ()))


def _are_ids(value) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int and item >= 0 for item in value)


def random_prompts(vocab: int) -> list[Prompt]:
    """Return prompts of random token ids with a fixed seed, for bundles without a tokenizer."""
    random = np.random.default_rng(0)
    return [
        Prompt(f"{length} random tokens", tokens=tuple(int(token) for token in random.integers(vocab, size=length)))
        for length in RANDOM_LENGTHS
    ]


def encoded_prompts(
    bundle: Bundle, path: str | None = None, given: Sequence[Prompt] | None = None
) -> list[tuple[Prompt, list[int]]]:
    """Return prompts with their token ids: `given`, else those in the file at `path`, else those
    that castiron ships."""
    vocab, text = bundle.manifest.vocab, load_tokenizer(bundle) if bundle.tokenizer else None
    prompts = given or (read_prompts(path) if path or text else random_prompts(vocab))
    return [(prompt, encode(prompt, text, vocab)) for prompt in prompts]


def encode(prompt: Prompt, text, vocab: int) -> list[int]:
    """Return the token ids of a prompt; PipelineError for ids outside the vocabulary."""
    if prompt.tokens:
        if max(prompt.tokens) >= vocab:
            raise PipelineError(f"prompt {prompt.name!r} has token {max(prompt.tokens)}, but the vocabulary has {vocab} tokens")
        return list(prompt.tokens)
    if text is None:
        raise PipelineError(f"prompt {prompt.name!r} is text, but the bundle has no tokenizer; give token ids")
    if prompt.raw or text.chat_template is None:
        return text.encode(prompt.text)
    return text.encode_chat([{"role": "user", "content": prompt.text}])


def checkpoint_of(bundle: Bundle, given: str | None = None, *, any_format: bool = False) -> Path:
    """Return the path of the checkpoint that the bundle was compiled from: `given`, else the
    recorded path, else a download.

    PipelineError if it is missing, or if its hash is not the manifest's. With `any_format` the hash
    of a checkpoint in another format (GGUF or a directory) is not checked.
    """
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE, fetch
    from castiron.pipelines.checkpoints.open_checkpoint import checkpoint_sha256, find_checkpoint

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
        raise PipelineError(f"checkpoint of {bundle.path} is missing: {recorded or 'unknown'}; give its path with --checkpoint")
    if any_format and path.is_file() != (source.get("format") == "gguf"):
        return path
    expected = source.get("sha256")
    if expected and checkpoint_sha256(path) != expected:
        raise PipelineError(
            f"{path} is not the checkpoint that {bundle.path} was compiled from (its sha256 differs); give that one with "
            "--checkpoint, or compile again"
        )
    return path


def text_of(bundle: Bundle) -> Path | None:
    """Return the path of the text that the weights were calibrated on; PipelineError if it is
    missing or has changed."""
    recorded = bundle.manifest.source.get("calibrated")
    if recorded is None:
        return None
    path = Path(recorded["path"])
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != recorded["sha256"]:
        raise PipelineError(f"calibration text of {bundle.path} is missing or has changed: {path}; compile again")
    return path


def adapter_of(bundle: Bundle) -> Path | None:
    """Return the path of the adapter merged into the weights; PipelineError if it is missing or has
    changed."""
    from castiron.pipelines.checkpoints.adapter import adapter_sha256

    recorded = bundle.manifest.source.get("adapter")
    if recorded is None:
        return None
    path = Path(recorded["path"])
    if not path.is_dir() or adapter_sha256(path) != recorded["sha256"]:
        raise PipelineError(f"adapter of {bundle.path} is missing or has changed: {path}; compile again with it")
    return path


def load_reference(path: Path, weights: str, threads: int | None, adapter: Path | None = None, calibrated: Path | None = None):
    """Load the checkpoint with HF transformers, merge the adapter with peft, and round matrices as
    the bundle does.

    weights: the bundle's --weights. calibrated: path of the text on which the weights were
    calibrated.
    Raises PipelineError if transformers cannot read the checkpoint, or has no matrix by the name of
    a quantised one.
    """
    # Set before transformers is imported: its progress bar would garble castiron's.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from castiron.pipelines.checkpoints.adapter import merge, open_adapter
    from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
    from castiron.pipelines.compile.calibration import calibrate
    from castiron.pipelines.compile.options import Options
    from castiron.reference import hf

    try:
        model = hf.load(path, threads, adapter)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise PipelineError(f"transformers cannot read {path}: {reason}") from None
    if weights != "native" or adapter:
        checkpoint = open_checkpoint(path)
        checkpoint = merge(checkpoint, open_adapter(adapter)) if adapter else checkpoint
        options = Options(weights=weights, adapter=adapter and str(adapter), calibrate=calibrated and str(calibrated))
        _store_as(model, checkpoint, weights, calibrate(checkpoint, options, lambda stage, done: None))
    return model


def _store_as(model, checkpoint: Checkpoint, weights: str, importance: Mapping[str, np.ndarray]) -> None:
    """Round the model's matrices, in place, as a bundle of the checkpoint stores them."""
    import torch
    from transformers.pytorch_utils import Conv1D

    from castiron.emitter.codecs import dequantise
    from castiron.emitter.quantise import convert
    from castiron.pipelines.compile.weights import FLOATS, QUANTISED, codecs_of

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
                f"transformers has no counterpart of {name} to quantise like the bundle's weights; use castiron evaluate "
                "--against hf for the distance from the unquantised model"
            )
        with torch.no_grad():
            values = parameter.numpy().T if name in transposed else parameter.numpy()
            raw = np.ascontiguousarray(values).view(np.uint8)
            stored = torch.from_numpy(dequantise(codec, convert("f32", raw, codec, importance.get(name))))
            parameter.copy_(stored.T if name in transposed else stored)


def expect(model, prompt: list[int], ours: list[int]):
    """Return HF's greedy tokens after `prompt`, as `hf.Greedy`, valid up to their first difference
    from `ours`.

    One pass over `ours` gives HF's choice after each prefix. If a margin is below `CERTAIN`, HF
    generates token by token instead.
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


def greedy(session, prompt: Sequence[int], n: int) -> list[int]:
    """Return the `n` greedy tokens after a prompt; PipelineError if they exceed the session's
    context."""
    check_free_positions(session.context, len(prompt), n)
    session.rewind(0)
    tokens = [session.prefill(prompt)]
    while len(tokens) < n:
        tokens.append(session.step(tokens[-1]))
    return tokens


def compare(
    session,
    model,
    prompts: Sequence[tuple[Prompt, list[int]]],
    n: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Comparison]:
    """Compare `n` greedy tokens after each prompt; `progress` gets (done, all)."""
    for done, (prompt, tokens) in enumerate(prompts):
        if progress:
            progress(done, len(prompts))
        ours = greedy(session, tokens, n)
        theirs = expect(model, tokens, ours)
        yield Comparison(prompt, len(tokens), ours, theirs.tokens, theirs.margins)
    if progress:
        progress(len(prompts), len(prompts))
