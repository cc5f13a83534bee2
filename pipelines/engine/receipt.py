"""Receipts: everything that decides an answer, and hashes of its logits.

`evaluate/audit.py` computes an answer again from its receipt. A receipt is not signed: it proves
what a bundle computes, and not who computed it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass, fields, replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from castiron.pipelines.engine.sampling import Sampler, Sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import has_too_many_values, read_regular
from castiron.vmfb.bundle.json_record import RecordError, from_json, short, to_json

FORMAT = 1
# Hex digits of the hash of a token's logits.
DIGITS = 32


@dataclass(frozen=True)
class Receipt:
    """What an answer was computed from.

    format: version of this record. castiron: version of the program that generated the answer.
    bundle: `Manifest.sha256`. checkpoint: sha256 of the checkpoint, if the bundle has it.
    answer: token ids, with the end token if one ended the answer.
    logits: for each token of the answer, sha256 of the logits from which it was chosen, cut to 32
        hex digits.
    sampling: the fields of `Sampling`; a random answer always has a seed.
    max_tokens: None for no limit but the context.
    sha256: hash of the other fields.
    """

    format: int
    castiron: str
    bundle: str
    checkpoint: str | None
    numerics: str
    context: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    logits: tuple[str, ...]
    finish_reason: str
    sampling: dict[str, Any]
    max_tokens: int | None
    stop_tokens: tuple[int, ...]
    stop_strings: tuple[str, ...]
    repetition_stop: bool
    sha256: str = ""

    @property
    def digest(self) -> str:
        """The value that `sha256` must have."""
        content = json.dumps(to_json(replace(self, sha256="")), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(to_json(self)) + "\n"


class Transcript:
    """The tokens of an answer so far, the end token included, and a hash of the logits of each."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.hashes: list[str] = []

    def add(self, token: int, logits: np.ndarray) -> None:
        self.tokens.append(token)
        self.hashes.append(hashlib.sha256(logits).hexdigest()[:DIGITS])


def repeatable(sampling: Sampling | Sampler) -> Sampling:
    """Return `sampling` as a receipt records it: with plain numbers, and a seed if it is random.

    Raises PipelineError for a `Sampler`, whose random numbers depend on earlier answers.
    """
    if isinstance(sampling, Sampler):
        raise PipelineError("receipt needs sampling options, not a sampler that continues another answer; give a Sampling")
    if sampling.is_random and sampling.seed is None:
        sampling = replace(sampling, seed=secrets.randbits(53))
    return sampling_of(sampling_fields(sampling))


def sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """Return the fields of `sampling` as JSON values."""
    found = {each.name: _plain(getattr(sampling, each.name)) for each in fields(Sampling)}
    biases = {str(int(token)): _plain(bias) for token, bias in sampling.logit_bias.items()}
    return found | {"logit_bias": biases, "samplers": list(sampling.samplers)}


def _plain(value: Any) -> Any:
    # NumPy's numbers are not JSON.
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def sampling_of(values: dict[str, Any]) -> Sampling:
    """Return the recorded `Sampling`; PipelineError if a field is invalid."""
    if differing := values.keys() ^ {each.name for each in fields(Sampling)}:
        raise PipelineError(f"unknown or missing field: sampling.{short(min(differing))}")
    biases, samplers = values["logit_bias"], values["samplers"]
    if not isinstance(biases, dict) or not all(key.isascii() and key.isdigit() and len(key) < 10 for key in biases):
        raise PipelineError(f"sampling.logit_bias is {short(repr(biases))}; it must have token ids as keys")
    if not isinstance(samplers, list):
        raise PipelineError(f"sampling.samplers is {short(repr(samplers))}; it must be a list")
    return Sampling(**values | {"logit_bias": {int(key): bias for key, bias in biases.items()}, "samplers": tuple(samplers)})


def read_receipt(path: Path) -> Receipt:
    """Read a receipt; raise PipelineError if it is invalid, or OSError."""
    data = read_regular(path)
    try:
        if has_too_many_values(data):
            raise RecordError("it has too many values")
        value = json.loads(data)
        if isinstance(value, dict) and value.get("format", FORMAT) != FORMAT:
            raise RecordError(f"format is {short(repr(value['format']))}, but this castiron reads format {FORMAT}")
        receipt = from_json(Receipt, value)
        sampling_of(receipt.sampling)
    except (ValueError, RecursionError, RecordError, PipelineError, TypeError) as error:
        raise PipelineError(f"invalid receipt {path}: {short(str(error), 200)}") from None
    if not (receipt.prompt and receipt.answer) or len(receipt.answer) != len(receipt.logits):
        counts = f"{len(receipt.prompt)} tokens of prompt, {len(receipt.answer)} of answer and {len(receipt.logits)} hashes"
        raise PipelineError(f"invalid receipt {path}: it has {counts}")
    return receipt
