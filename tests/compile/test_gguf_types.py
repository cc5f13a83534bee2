"""A GGUF file of all supported types gives the same logits as its values in f32."""

from __future__ import annotations

import gguf
import numpy as np

from castiron.emitter.codecs import CODECS, dequantise
from castiron.pipelines.compile.compiler import compile_model
from castiron.pipelines.compile.options import Options
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session
from tests.support import tiny_gguf

SIZES = {
    "llama.block_count": 3,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.rope.dimension_count": 64,
}
LEAVES = {
    "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
    "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512),
}  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]


def tensors(as_f32: bool) -> dict:
    """Return tensors whose matrices have all types in turn; gate and up share one, so that they are
    one matmul.
    """
    shapes = {"token_embd": (96, 256)} | {f"blk.{i}.{leaf}": shape for i in range(3) for leaf, shape in LEAVES.items()}
    found = {f"blk.{i}.{norm}.weight": np.ones(256, np.float32) for i in range(3) for norm in ("attn_norm", "ffn_norm")}
    for number, (name, shape) in enumerate(shapes.items()):
        ups = sum(earlier.endswith("ffn_up") for earlier in list(shapes)[: number + 1])
        codec = list(CODECS)[(number - ups) % len(CODECS)]
        raw = raw_rows(codec, *shape, seed=number)
        values = dequantise(codec, raw)
        kind = gguf.GGMLQuantizationType[codec.upper()]
        stored = raw if CODECS[codec].quantised else values
        found[f"{name}.weight"] = values if as_f32 else (stored, kind)
    return found | {"output_norm.weight": np.ones(256, np.float32)}


def test_a_file_of_all_types_gives_the_logits_of_its_numbers(tmp_path):
    logits, codecs = [], []
    for as_f32 in (False, True):
        path = tmp_path / f"{'f32' if as_f32 else 'mixed'}.gguf"
        tiny_gguf.write_gguf(path, "llama", tiny_gguf.LLAMA_SIZES | SIZES, tensors(as_f32))
        bundle = open_bundle(compile_model(path, tmp_path / path.stem, Options(context=16, batch=(), speculate=())).bundle)
        codecs.append(set(bundle.manifest.codecs))
        session = Session(bundle, 2)
        session.prefill(PROMPT)
        found = [np.array(session.logits())]
        session.step(7)
        logits.append(np.stack([*found, np.array(session.logits())]))
    assert codecs[0] == set(CODECS) and codecs[1] == {"f32"}
    assert 0 < np.abs(logits[0] - logits[1]).max() < 2e-5 * np.abs(logits[1]).max()
