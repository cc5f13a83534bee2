"""The engines that `castiron bench` compares with: llama.cpp and HF transformers.

Each class has the same methods. `fill(tokens)` puts tokens in an empty cache. `prefill(tokens)`
does the same, and returns the seconds until the logits of the last token are computed.
`decode(depth, tokens)` appends tokens one by one from position `depth` on, and returns the seconds.
`first(tokens)` returns the greedy token after `tokens`. The times contain the model's forward
passes only, neither loading nor tokenization.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from castiron.vmfb.cpu_features import host_features
from castiron.vmfb.targets import TILES


def open_llama(model: str | Path, threads: int, context: int, **options: Any) -> Any:
    """Return a `llama_cpp.Llama` for a GGUF file; options: more arguments of its constructor.

    On CPUs with AMX, weights are not repacked, because llama-cpp-python 0.3.36 crashes there.
    """
    from llama_cpp import Llama, llama_cpp

    defaults = llama_cpp.llama_model_default_params

    def default_params() -> Any:
        params = defaults()
        params.use_extra_bufts = TILES not in host_features()
        return params

    with patch.object(llama_cpp, "llama_model_default_params", default_params):
        return Llama(str(model), n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False, **options)


class LlamaCpp:
    """llama.cpp with llama-cpp-python's defaults: f16 cache, int8 activations."""

    def __init__(self, model: str | Path, threads: int, context: int):
        self.llama = open_llama(model, threads, context)

    def prefill(self, tokens: Sequence[int]) -> float:
        self.llama.reset()
        start = time.perf_counter()
        self.llama.eval(tokens)
        return time.perf_counter() - start

    fill = prefill

    def decode(self, depth: int, tokens: Sequence[int]) -> float:
        # `eval` removes cache entries at positions from n_tokens on.
        self.llama.n_tokens = depth
        start = time.perf_counter()
        for token in tokens:
            self.llama.eval((token,))
        return time.perf_counter() - start

    def first(self, tokens: Sequence[int]) -> int:
        self.prefill(tokens)
        return self.llama.sample(temp=0.0)


class HuggingFace:
    """HF transformers with torch in f32, and the KV cache of transformers."""

    def __init__(self, model: str | Path, threads: int, context: int):
        import torch

        from castiron.reference import hf

        self.torch = torch
        self.model = hf.load(model, threads)
        self.cache = None

    def prefill(self, tokens: Sequence[int]) -> float:
        self.cache = None
        start = time.perf_counter()
        self._forward(tokens)
        return time.perf_counter() - start

    fill = prefill

    def decode(self, depth: int, tokens: Sequence[int]) -> float:
        if depth == 0:
            self.cache = None
        elif (extra := self.cache.get_seq_length() - depth) > 0:
            # A negative length is the number of positions to remove.
            self.cache.crop(-extra)
        start = time.perf_counter()
        for token in tokens:
            self._forward((token,))
        return time.perf_counter() - start

    def first(self, tokens: Sequence[int]) -> int:
        self.cache = None
        return int(self._forward(tokens)[0, -1].argmax())

    def _forward(self, tokens: Sequence[int]):
        with self.torch.inference_mode():
            out = self.model(self.torch.tensor([list(tokens)]), past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        return out.logits


ENGINES = {"llama.cpp": LlamaCpp, "hf": HuggingFace}
# Engine: the module that it needs, and how to install that.
PEERS = {
    "llama.cpp": ("llama_cpp", "pip install llama-cpp-python==0.3.36"),
    "hf": ("transformers", "pip install torch==2.13.0 transformers==5.23.0 gguf==0.19.0"),
}
