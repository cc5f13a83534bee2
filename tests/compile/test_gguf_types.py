"""Bundles of GGUF files of all types, and for matrix instructions, give the logits of plain ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np

from castiron.emitter.codecs import CODECS, dequantise
from castiron.emitter.kernels.mlir import isa
from castiron.pipelines.checkpoints.gguf.gguf_file import GGML_TYPE
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.vmfb import targets
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.run.session import Session
from tests.support import tiny_gguf

TYPES = gguf.GGMLQuantizationType
STORED = [codec for codec in GGML_TYPE if codec != "q2_0"]  # `gguf` does not have Q2_0 yet
LAYERS = 5
SIZES = {
    "llama.block_count": LAYERS,
    "llama.embedding_length": 256,
    "llama.feed_forward_length": 512,
    "llama.rope.dimension_count": 64,
}
LEAVES = {
    "attn_q": (256, 256), "attn_k": (128, 256), "attn_v": (128, 256), "attn_output": (256, 256),
    "ffn_gate": (512, 256), "ffn_up": (512, 256), "ffn_down": (256, 512),
}  # fmt: skip
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
OPTIONS = Options(context=16, batch=(), verify_widths=())


def compiled(checkpoint: Path, out: Path, options: Options = OPTIONS) -> tuple[Bundle, np.ndarray]:
    """Return a checkpoint's bundle, and its logits after the prompt and after each of a few steps."""
    bundle = open_bundle(compile_model(checkpoint, out, options).bundle)
    session = Session(bundle, 2)
    session.prefill(PROMPT)
    found = [np.array(session.logits())]
    for token in PROMPT[:3]:
        session.step(token)
        found.append(np.array(session.logits()))
    return bundle, np.stack(found)


def agree(found: np.ndarray, want: np.ndarray) -> None:
    """Check that logits differ by rounding only."""
    assert 0 < np.abs(found - want).max() < 2e-5 * np.abs(want).max()
    assert (found.argmax(axis=1) == want.argmax(axis=1)).all()


def tensors(as_f32: bool) -> dict:
    """Return tensors whose matrices have all types in turn; gate and up share a type."""
    shapes = {"token_embd": (96, 256)} | {f"blk.{i}.{leaf}": shape for i in range(LAYERS) for leaf, shape in LEAVES.items()}
    found = {f"blk.{i}.{norm}.weight": np.ones(256, np.float32) for i in range(LAYERS) for norm in ("attn_norm", "ffn_norm")}
    for number, (name, shape) in enumerate(shapes.items()):
        ups = sum(earlier.endswith("ffn_up") for earlier in list(shapes)[: number + 1])
        codec = STORED[(number - ups) % len(STORED)]
        raw = raw_rows(codec, *shape, seed=number)
        values = dequantise(codec, raw)
        stored = raw if CODECS[codec].quantised else values
        found[f"{name}.weight"] = values if as_f32 else (stored, TYPES[codec.upper()])
    return found | {"output_norm.weight": np.ones(256, np.float32)}


def test_a_file_of_all_types_gives_the_logits_of_its_numbers(tmp_path):
    logits, codecs = [], []
    for as_f32 in (False, True):
        path = tmp_path / f"{'f32' if as_f32 else 'mixed'}.gguf"
        tiny_gguf.write_gguf(path, "llama", tiny_gguf.LLAMA_SIZES | SIZES, tensors(as_f32))
        bundle, found = compiled(path, tmp_path / path.stem)
        codecs.append(set(bundle.manifest.codecs))
        logits.append(found)
    assert codecs == [set(STORED), {"f32"}]
    agree(*logits)


def test_a_bundle_on_matrix_units_gives_the_logits_of_others(tmp_path, monkeypatch):
    """The model has each kind of packed panel: codecs with minima and without, bf16, f16 and f32."""
    matrices = [(n, a) for n, a in tiny_gguf.llama_tensors().items() if a.ndim == 2 and a.shape[-1] % 32 == 0]
    stored = [TYPES.Q4_1, TYPES.BF16, TYPES.F16, TYPES.F32, TYPES.Q8_0]
    mixed = {name: (0.1 * array, stored[i % len(stored)]) for i, (name, array) in enumerate(matrices)}
    checkpoint = tiny_gguf.write_llama(tmp_path / "tiny.gguf", tensors=mixed)
    options = replace(OPTIONS, prefill=(16,))  # matrix instructions need nine tokens
    with monkeypatch.context() as amx:
        # The host is a CPU with matrix instructions, in their plain form.
        amx.setitem(isa.ISAS, "amx", isa.AMX.plain)
        amx.setitem(targets.TARGETS, "host", replace(targets.TARGETS["host"], isa="amx"))
        matrix, found = compiled(checkpoint, tmp_path / "matrix", options)
    arithmetic = matrix.manifest.compile["arithmetic"]
    assert arithmetic.keys() == {"x in exact pieces of bf16 by plain", "x in integers of 24 bits by plain"}
    assert min(arithmetic.values()) >= 2
    exact, want = compiled(checkpoint, tmp_path / "exact", options)
    assert "bf16" not in str(exact.manifest.compile["arithmetic"]) or exact.manifest.target.isa == "amx"
    agree(found, want)
