"""A bundle's perplexity, and its distance from a base: another bundle, HF transformers or llama.cpp on the same checkpoint."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from castiron.pipelines.casting.weights import QUANTISED
from castiron.pipelines.checking.likelihood import BundleRows, Rows, Told
from castiron.pipelines.checking.verify import adapter_of, checkpoint_of, encoded_prompts, expect, load_reference
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.generate import Generation
from castiron.pipelines.generation.text import load_text
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.session import Session

# Of verify's prompts every so many-th is continued.
EVERY = 4


def arithmetic(numerics: str, cache: str) -> str:
    """How a bundle computes: `exact`, or `fast, cache of f16`."""
    return numerics + f", cache of {cache}" * (cache != "f32")


class Base(Rows):
    """What a bundle is compared with: rows of logits, and greedy texts."""

    name: str

    @abstractmethod
    def first_difference(self, prompt: list[int], ours: list[int]) -> int | None:
        """Where `ours`, the bundle's greedy tokens after `prompt`, first differ from those of the base."""


class BundleBase(BundleRows, Base):
    """Another bundle of the model."""

    def __init__(self, bundle: Bundle, threads: int | None):
        super().__init__(Session(bundle, threads))
        self.name = f"{bundle.path} ({arithmetic(bundle.manifest.numerics, bundle.manifest.cache)})"

    def first_difference(self, prompt: list[int], ours: list[int]) -> int | None:
        return first_difference(greedy(self.session, prompt, len(ours)), ours)


class HuggingFace(Base):
    """HF transformers in f32, which reads the checkpoint by itself."""

    name = "HF transformers"

    def __init__(self, checkpoint: Path, weights: str, threads: int, adapter: Path | None):
        self.model = load_reference(checkpoint, weights, threads, adapter)

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        import torch

        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            found = self.model(ids, use_cache=False, logits_to_keep=len(tokens) - first).logits[0].numpy()
        yield from found

    def first_difference(self, prompt: list[int], ours: list[int]) -> int | None:
        return first_difference(expect(self.model, prompt, ours).tokens, ours)


class LlamaCpp(Base):
    """llama.cpp on the checkpoint, through llama-cpp-python, with its defaults: f16 cache, activations rounded to bytes."""

    name = "llama.cpp"

    def __init__(self, checkpoint: Path, context: int, threads: int):
        from llama_cpp import Llama

        try:
            self.llama = Llama(
                str(checkpoint), n_ctx=context, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False
            )
        except ValueError as error:
            raise PipelineError(f"llama.cpp cannot read {checkpoint}: {error}") from None

    def rows(self, tokens: Sequence[int], first: int) -> Iterator[np.ndarray]:
        self.llama.reset()
        self.llama.eval(list(tokens))
        yield from self.llama.scores[first : len(tokens)]

    def first_difference(self, prompt: list[int], ours: list[int]) -> int | None:
        self.llama.reset()
        self.llama.eval(prompt)
        for index, token in enumerate(ours):
            if int(np.argmax(self.llama.scores[self.llama.n_tokens - 1])) != token:
                return index
            self.llama.eval([token])
        return None


def base_of(bundle: Bundle, named: str, context: int, threads: int, checkpoint: str | None = None) -> Base:
    """The base that `--against` names: hf, llama.cpp or where a bundle is.

    `context`: as many positions as it needs at least. PipelineError for one that has another vocabulary or tokenizer, and
    for a checkpoint that the engine cannot read.
    """
    if named == "hf":
        # What quantising cost is what one asks for; rounding to a float type is a choice of numbers, and left as it is.
        weights = "native" if bundle.manifest.weights in QUANTISED else bundle.manifest.weights
        return HuggingFace(checkpoint_of(bundle, checkpoint), weights, threads, adapter_of(bundle))
    if named == "llama.cpp":
        import llama_cpp  # noqa: F401  It is said to be missing before anything is looked for.

        if adapter_of(bundle):
            raise PipelineError("llama.cpp would run the checkpoint without the bundle's adapter: compare with hf or a bundle")
        source = checkpoint_of(bundle, checkpoint, any_format=True)
        if source.is_dir():
            raise PipelineError(f"llama.cpp reads GGUF files and {source} is a directory: give a file with --checkpoint")
        return LlamaCpp(source, context, threads)
    other = open_bundle(named)
    if other.manifest.vocab != bundle.manifest.vocab or not same_tokens(bundle, other):
        raise PipelineError(f"{other.path} has other tokens than {bundle.path}: compare bundles of the same model")
    if other.manifest.context < context:
        raise PipelineError(
            f"{other.path} has a context of {other.manifest.context} and this needs {context}: give a smaller -c or -n, or "
            "compile it with a larger --context"
        )
    return BundleBase(other, threads)


def same_tokens(one: Bundle, other: Bundle) -> bool:
    """Whether both have the same tokenizer, or one of them none."""
    if one.tokenizer is None or other.tokenizer is None:
        return True
    return load_text(one).tokenizer.to_str() == load_text(other).tokenizer.to_str()


def prompts_of(bundle: Bundle, n: int) -> list[tuple[str, list[int]]]:
    """A few of verify's prompts with their ids, of those that leave room for `n` tokens; none for 0 tokens."""
    found = [] if n == 0 else encoded_prompts(bundle)[::EVERY]
    return [(prompt.name, tokens) for prompt, tokens in found if len(tokens) + n <= bundle.manifest.context]


def greedy_texts(session: Session, base: Base, prompts: Sequence[tuple[str, list[int]]], n: int, told: Told) -> dict:
    """Where `n` greedy tokens after each prompt, end-of-text tokens passed over, first differ from those of the base.

    tokens, equal (how many prompts), prompts (name, first_difference: a position among the tokens, or None).
    """
    found = []
    for done, (name, prompt) in enumerate(prompts):
        told(done, len(prompts))
        at = base.first_difference(prompt, greedy(session, prompt, n))
        found.append({"name": name, "first_difference": at})
    told(1, 1)
    return {"tokens": n, "equal": sum(each["first_difference"] is None for each in found), "prompts": found}


def greedy(session: Session, prompt: list[int], n: int) -> list[int]:
    """The `n` greedy tokens after a prompt."""
    session.rewind(0)
    return list(Generation(session, prompt, max_tokens=n, stop_tokens=()))


def first_difference(theirs: Sequence[int], ours: Sequence[int]) -> int | None:
    return next((index for index, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]), None)
