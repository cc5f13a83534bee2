"""HF transformers in f32 on the CPU: the oracle for tokens, logits and activations."""

from __future__ import annotations

import os

# transformers' own switch does not disable the progress bar of its GGUF reader.
os.environ.setdefault("TQDM_DISABLE", "1")

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging


@dataclass(frozen=True)
class Greedy:
    """Greedily chosen tokens, each with its margin: the largest minus the second largest logit."""

    tokens: list[int]
    margins: list[float]


def load(path: str | Path, threads: int | None = None, adapter: str | Path | None = None) -> PreTrainedModel:
    """Load the model of a GGUF file or HF directory in f32, with eager attention, in eval mode.

    threads: torch's, of this process. adapter: folder of a PEFT adapter to merge.
    """
    if threads:
        torch.set_num_threads(threads)
    logging.disable_progress_bar()
    path = Path(path)
    source = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    directory = path.parent if source else path
    model = AutoModelForCausalLM.from_pretrained(
        directory, **source, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).merge_and_unload()
    if model._can_set_experts_implementation():
        # HF's grouped matmul sums the experts in another order than its loop, which is the reference here.
        model.set_experts_implementation("eager")
    return model.eval()


def greedy(model: PreTrainedModel, tokens: Sequence[int], n: int) -> Greedy:
    """Generate `n` tokens after `tokens` by greedy decoding, with the KV cache of transformers."""
    found, margins, cache, feed = [], [], None, list(tokens)
    original = getattr(model.config, "original_max_position_embeddings", None)
    with torch.inference_mode():
        for _ in range(n):
            if len(tokens) + len(found) - 1 == original:
                # LongRoPE: `prepare_inputs_for_generation` of such models drops the cache.
                cache, feed = None, [*tokens, *found]
            out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, last = out.past_key_values, out.logits[0, -1].numpy()
            best = int(np.argmax(last))
            second = float(np.partition(last, -2)[-2])
            found.append(best)
            margins.append(float(last[best]) - second)
            feed = [best]
    return Greedy(found, margins)


def logits(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Return logits f32 [len(tokens), vocab] of every position, in one pass without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def activations(model: PreTrainedModel, tokens: Sequence[int], names: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the outputs of the submodules `names`, by name: f32 [len(tokens), features]."""
    with capture(model, names) as found:
        logits(model, tokens)
    return found


@contextmanager
def capture(model: PreTrainedModel, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    """Yield a dict that gets the outputs of submodules, f32 [tokens, features]."""
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ValueError(f"{type(model).__name__} has no submodule {', '.join(unknown)}; use names from named_modules()")
    found: dict[str, np.ndarray] = {}

    def keep(name: str):
        def hook(_module, _args, output):
            output = output[0] if isinstance(output, tuple) else output
            tensor = output if isinstance(output, torch.Tensor) else output.last_hidden_state
            found[name] = tensor[0].detach().numpy().copy()

        return hook

    handles = [modules[name].register_forward_hook(keep(name)) for name in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
