"""HF transformers in f32 on the CPU: the oracle that tokens, logits and activations are compared with."""

from __future__ import annotations

import os

# Reading a GGUF file, transformers draws a bar that its own switch does not turn off.
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
    """Greedy tokens and, for each, how far its logit was above the second largest."""

    tokens: list[int]
    margins: list[float]


def load(path: str | Path, threads: int | None = None, adapter: str | Path | None = None) -> PreTrainedModel:
    """The model of a GGUF file, as transformers reads it, or of an HF directory; f32, plain attention, evaluation mode.

    `adapter`: a directory of peft's, merged into the weights by peft. `threads` sets torch's thread count for the whole
    process. Raises OSError or ValueError, as transformers does, for a path that holds no model it knows.
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
        # The grouped form sums experts in another order; the loop is the definition.
        model.set_experts_implementation("eager")
    return model.eval()


def greedy(model: PreTrainedModel, tokens: Sequence[int], n: int) -> Greedy:
    """The `n` tokens that follow `tokens`, each the most likely one (the lowest index on a tie), end tokens included.

    One pass over `tokens`, then one token at a time with transformers' own KV cache.
    """
    found, margins, cache, feed = [], [], None, list(tokens)
    with torch.inference_mode():
        for _ in range(n):
            out = model(torch.tensor([feed]), past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, last = out.past_key_values, out.logits[0, -1].numpy()
            best = int(np.argmax(last))
            second = float(np.partition(last, -2)[-2])
            found.append(best)
            margins.append(float(last[best]) - second)
            feed = [best]
    return Greedy(found, margins)


def logits(model: PreTrainedModel, tokens: Sequence[int]) -> np.ndarray:
    """Logits at every position of `tokens`, in one pass without a cache: f32 [len(tokens), vocab]."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()


def activations(model: PreTrainedModel, tokens: Sequence[int], names: Sequence[str]) -> dict[str, np.ndarray]:
    """What each named submodule (`model.layers.0.self_attn.q_proj`, ...) gives for `tokens`, in one pass without a cache.

    Arrays are as the submodule returns them without the batch dimension, mostly f32 [len(tokens), features]. Raises
    ValueError for a name that is no submodule.
    """
    with capture(model, names) as found:
        logits(model, tokens)
    return found


@contextmanager
def capture(model: PreTrainedModel, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
    """Inside, every run of the model leaves the named submodules' outputs in the dictionary (the last run stays)."""
    modules = dict(model.named_modules())
    unknown = [name for name in names if name not in modules]
    if unknown:
        raise ValueError(f"{type(model).__name__} has no submodule {', '.join(unknown)}")
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
