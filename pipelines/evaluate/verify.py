"""Compare a bundle's greedy tokens with those of HF transformers on the same checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from castiron.pipelines.checkpoints.column_order import column_orders
from castiron.pipelines.checkpoints.hf.open_directory import CONFIG, SINGLE, quantization_config, tensors_of
from castiron.pipelines.checkpoints.hf.quantised_weights import quantised_weights
from castiron.pipelines.checkpoints.hf.read_files import json_object
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import read_text
from castiron.pipelines.locate import HubName
from castiron.pipelines.text.generate import check_token_ids
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle

if TYPE_CHECKING:
    from castiron.pipelines.checkpoints.checkpoint import Checkpoint

DEFAULT_PROMPTS = "verify_prompts.jsonl"
# If HF's two largest logits differ by more than this, it chooses the same token whether it reads a text in one pass or
# token by token: rounding changes logits by about 1e-5.
CERTAIN = 2e-3
# Lengths of random prompts for a bundle without tokenizer: sizes of prefill chunks, and lengths near and between them.
RANDOM_LENGTHS = (1, 2, 3, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 100, 127, 128, 129, 300, 1000)


@dataclass(frozen=True)
class Prompt:
    """A prompt for castiron and HF; raw: whether to encode the text without the chat template."""

    name: str
    text: str = ""
    raw: bool = False
    tokens: tuple[int, ...] = ()


def first_difference(theirs: Sequence[int], ours: Sequence[int]) -> int | None:
    """Return the first index at which two equally long sequences differ; None if they are equal."""
    return next((index for index, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]), None)


def read_prompts(path: str | Path | None = None) -> list[Prompt]:
    """Return the prompts in a file, by default castiron's; `verify --help` has the format."""
    file = Path(path) if path else files("castiron.pipelines.evaluate") / DEFAULT_PROMPTS
    lines = enumerate(read_text(file).split("\n"), 1)
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
        raise PipelineError(f"{where} starts with {{ but is not JSON ({error}); correct the line") from None
    text, tokens = value.get("prompt", ""), value.get("tokens", [])
    if unknown := sorted(set(value) - {"name", "prompt", "tokens", "raw"}):
        raise PipelineError(f"unknown key in {where}: {unknown[0]!r}; use name, prompt, tokens or raw")
    are_ids = isinstance(tokens, list) and all(type(token) is int and token >= 0 for token in tokens)
    if not isinstance(text, str) or not are_ids or bool(text) == bool(tokens):
        raise PipelineError(
            f'invalid prompt in {where}; give either "prompt" (a text) or "tokens" (a list of ids of at least 0), not both'
        )
    name = str(value.get("name") or text[:40] or f"{len(tokens)} tokens")
    return Prompt(name, text, value.get("raw") is True, tuple(tokens))


def random_prompts(vocab: int) -> list[Prompt]:
    """Return the same prompts of random token ids in every call."""
    random = np.random.default_rng(0)
    return [
        Prompt(f"{length} random tokens", tokens=tuple(int(token) for token in random.integers(vocab, size=length)))
        for length in RANDOM_LENGTHS
    ]


def encoded_prompts(
    bundle: Bundle, path: str | None = None, given: Sequence[Prompt] | None = None
) -> list[tuple[Prompt, list[int]]]:
    """Return pairs (prompt, token ids) of `given`, of a file, or of the default prompts."""
    vocab, tokenizer = bundle.manifest.vocab, load_tokenizer(bundle) if bundle.tokenizer else None
    prompts = given or (read_prompts(path) if path or tokenizer else random_prompts(vocab))
    return [(prompt, encode(prompt, tokenizer, vocab)) for prompt in prompts]


def encode(prompt: Prompt, tokenizer, vocab: int) -> list[int]:
    """Return a prompt's token ids; PipelineError if the model cannot read them."""
    if prompt.tokens:
        check_token_ids(prompt.tokens, vocab, f"prompt {prompt.name!r}: ")
        return list(prompt.tokens)
    if tokenizer is None:
        raise PipelineError(f"prompt {prompt.name!r} is text, but the bundle has no tokenizer; give token ids")
    if prompt.raw or tokenizer.chat_template is None:
        return tokenizer.encode(prompt.text)
    return tokenizer.encode_chat([{"role": "user", "content": prompt.text}])


def checkpoint_of(bundle: Bundle, given: str | None = None, *, any_format: bool = False) -> Path:
    """Return the path of the checkpoint from which a bundle was compiled; download it if missing.

    given: path or name of the checkpoint; by default, the path in the manifest. any_format: whether
    `given` may be the same model in the other format, which is not checked. Raises PipelineError if
    the sha256 differs from the one in the manifest.
    """
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE, canonical_name, fetch
    from castiron.pipelines.checkpoints.open_checkpoint import checkpoint_sha256, find_checkpoint

    source = bundle.manifest.source
    recorded = source.get("path")
    if given is not None:
        path = find_checkpoint(given)
    elif recorded and Path(recorded).exists():
        path = Path(recorded)
    elif (name := canonical_name(source.get("model", ""))) in CATALOGUE:
        path = fetch(name)
    elif hub := source.get("hub"):
        path = find_checkpoint(f"hf.co/{HubName(hub['repository'], hub['revision'], hub.get('file'))}")
    else:
        raise PipelineError(
            f"checkpoint of {bundle.path} is missing: {recorded or 'no path in the manifest'}; give its path with --checkpoint"
        )
    if any_format and path.is_file() != (source.get("format") == "gguf"):
        return path
    expected = source.get("sha256")
    if expected and checkpoint_sha256(path) != expected:
        raise PipelineError(
            f"{path} is not the checkpoint that {bundle.path} was compiled from (its sha256 differs); give the original with "
            "--checkpoint, or compile again"
        )
    return path


def text_of(bundle: Bundle) -> Path | None:
    """Return the path of the bundle's calibration text; None if it was compiled without one."""
    sha256 = lambda path: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None
    return _unchanged(bundle, "calibrated", "calibration text", sha256)


def adapter_of(bundle: Bundle) -> Path | None:
    from castiron.pipelines.checkpoints.adapter import adapter_sha256

    return _unchanged(bundle, "adapter", "adapter", lambda path: adapter_sha256(path) if path.is_dir() else None)


def _unchanged(bundle: Bundle, key: str, what: str, sha256: Callable[[Path], str | None]) -> Path | None:
    if (recorded := bundle.manifest.source.get(key)) is None:
        return None
    path = Path(recorded["path"])
    if sha256(path) != recorded["sha256"]:
        raise PipelineError(f"{what} of {bundle.path} is missing or has changed: {path}; compile the bundle again")
    return path


def load_reference(path: Path, weights: str, threads: int | None, adapter: Path | None = None, calibrated: Path | None = None):
    """Load a checkpoint with HF transformers, and round its weights as in the bundle.

    weights: the bundle's type of weights. adapter: folder of a LoRA adapter to merge. calibrated:
    the calibration text, or None.
    """
    # Set before transformers is imported, because its progress bar would overwrite castiron's.
    os.environ.setdefault("TQDM_DISABLE", "1")
    from castiron.pipelines.checkpoints.adapter import merge, open_adapter
    from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
    from castiron.pipelines.compile.calibration import calibrate
    from castiron.pipelines.compile.compile_options import Options
    from castiron.reference import hf

    try:
        with dequantised(path) as directory:
            model = hf.load(directory, threads, adapter)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise PipelineError(f"transformers cannot read {path}: {reason}; give another checkpoint with --checkpoint") from None
    if weights != "native" or adapter:
        checkpoint = open_checkpoint(path)
        checkpoint = merge(checkpoint, open_adapter(adapter)) if adapter else checkpoint
        options = Options(weights=weights, adapter=adapter and str(adapter), calibrate=calibrated and str(calibrated))
        _store_as(model, checkpoint, weights, calibrate(checkpoint, options, lambda stage, done: None))
    return model


def _store_as(model, checkpoint: Checkpoint, weights: str, importance: Mapping[str, np.ndarray]) -> None:
    import torch
    from transformers.pytorch_utils import Conv1D

    from castiron.emitter.abi import FLOATS, QUANTISED
    from castiron.emitter.codecs import dequantise
    from castiron.emitter.codecs.quantise import convert
    from castiron.pipelines.compile.weight_codecs import codecs_of

    codecs = codecs_of(checkpoint, weights, requantise=True)
    transposed = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2:
            continue
        codec = weights if weights in FLOATS else codecs.get(name)
        if codec is None and weights not in QUANTISED:
            continue
        if codec is None:
            raise PipelineError(
                f"cannot quantise the HF model: the bundle has no tensor {name}; compare with the unquantised "
                "HF model: castiron evaluate --against hf"
            )
        if name in checkpoint.tensors and codec == checkpoint.tensors[name].codec:
            continue
        with torch.no_grad():
            values = parameter.numpy().T if name in transposed else parameter.numpy()
            raw = np.ascontiguousarray(values).view(np.uint8)
            stored = torch.from_numpy(dequantise(codec, convert("f32", raw, codec, importance.get(name))))
            parameter.copy_(stored.T if name in transposed else stored)


def expect(model, prompt: list[int], ours: list[int]):
    """Return an HF model's greedy tokens after a prompt, each with its margin over the second.

    HF reads the prompt and castiron's tokens `ours` in one pass, so HF's tokens after the first
    difference are not valid. With a margin below CERTAIN, or if LongRoPE's frequencies change in
    between, HF generates token by token instead.
    """
    import torch

    from castiron.reference import hf

    original = getattr(model.config, "original_max_position_embeddings", None)
    if original and len(prompt) <= original < len(prompt) + len(ours) - 1:
        return hf.greedy(model, prompt, len(ours))
    with torch.inference_mode():
        ids = torch.tensor([prompt + ours[:-1]])
        logits = model(ids, use_cache=False, logits_to_keep=len(ours)).logits[0].numpy()
    tokens = [int(token) for token in logits.argmax(-1)]
    margins = [float(largest - second) for second, largest in np.sort(np.partition(logits, -2)[:, -2:])]
    end = first_difference(tokens, ours)
    if min(margins[: None if end is None else end + 1]) < CERTAIN:
        return hf.greedy(model, prompt, len(ours))
    return hf.Greedy(tokens, margins)


def greedy(session, prompt: Sequence[int], n: int) -> list[int]:
    """Return `n` greedy tokens after a prompt, also past an end token."""
    session.rewind(0)
    tokens = [session.prefill(prompt)]
    while len(tokens) < n:
        tokens.append(session.step(tokens[-1]))
    return tokens


def compare(session, model, prompt: Prompt, tokens: list[int], n: int) -> dict[str, Any]:
    """Compare `n` greedy tokens of castiron and HF; return an object for the JSON output."""
    ours = greedy(session, tokens, n)
    theirs = expect(model, tokens, ours)
    at = first_difference(theirs.tokens, ours)
    return {
        "name": prompt.name,
        "prompt_tokens": len(tokens),
        "exact": at is None,
        "first_difference": at,
        "castiron": None if at is None else ours[at],
        "hf": None if at is None else theirs.tokens[at],
        "hf_margin": None if at is None else theirs.margins[at],
        "smallest_hf_margin": min(theirs.margins[: None if at is None else at + 1]),
        "tokens": ours,
    }


# Methods that transformers reads without other libraries.
_OF_TRANSFORMERS = ("fp8", "mxfp4")
_OTHER_FILES = ("generation_config.json", "tokenizer.json", "tokenizer_config.json")


@contextmanager
def dequantised(path: Path) -> Iterator[Path]:
    """Yield an HF directory of the model that transformers can read without other libraries.

    This is `path` itself, or a temporary copy with f32 weights, for example of GPTQ.
    """
    full_config = json_object(path / CONFIG) if path.is_dir() else None
    config = None if full_config is None else quantization_config(path, full_config)
    if full_config is None or config is None or config.get("quant_method") in _OF_TRANSFORMERS:
        yield path
        return
    from safetensors.numpy import save_file

    found, _ = quantised_weights(path, config, tensors_of(path, True))
    found, orders = column_orders(found)
    values = {}
    for name, tensor in found.items():
        if name in orders.values():
            continue
        values[name] = tensor.dequantise()
        if order := orders.get(name):
            values[name] = values[name][:, np.argsort(found[order].dequantise())]
    text = full_config.get("text_config")
    for own in (full_config, text if isinstance(text, dict) else {}):
        own.pop("quantization_config", None)
    with TemporaryDirectory() as directory:
        copy = Path(directory)
        save_file({name: np.ascontiguousarray(each) for name, each in values.items()}, copy / SINGLE, {"format": "pt"})
        (copy / CONFIG).write_text(json.dumps(full_config), encoding="utf-8")
        for file in _OTHER_FILES:
            if (path / file).is_file():
                shutil.copy(path / file, copy)
        yield copy
