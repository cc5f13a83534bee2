"""Every family from a quantised GGUF file has HF's logits of the dequantised weights."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from castiron.emitter.models import FAMILIES
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.evaluate.random_checkpoint import raw_rows
from castiron.reference import hf
from castiron.reference.tiny import tiny_model
from tests.emitter.family_harness import Pair, assert_same_logits, prompt
from tests.emitter.test_codecs import expected
from tests.support.gguf_models import FALCON_MULTIPLIERS, IMPLIED
from tests.support.hf_to_gguf import GGUF_NAMES, metadata_of, rope_tensors, tensors_of
from tests.support.tiny_gguf import write_gguf

Q8_0, Q4_0, Q5_1 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "Q5_1"))

# Parameters that HF has as [..., in, out].
TRANSPOSED = {"gpt2": re.compile(r"c_(attn|proj|fc)\.weight"), "gpt_oss": re.compile(r"experts\.(gate_up|down)_proj$")}
# Files of Mistral are of llama.cpp's architecture llama, which has no window. Files of the others are not read.
WITHOUT_GGUF = {"mistral", "lfm3"}


def test_every_family_that_llama_cpp_defines_is_tried():
    assert set(FAMILIES) - WITHOUT_GGUF == set(GGUF_NAMES)


def kind_of(name: str, shape: tuple[int, ...]) -> gguf.GGMLQuantizationType | None:
    """Return a tensor's type: v and down_proj unlike others, f32 if rows are not made of blocks."""
    if len(shape) < 2 or shape[-1] % 32 or name.endswith("bias") or "norm" in name:
        return None
    if ".v_proj." in name or ".attn_v." in name:
        return Q5_1
    return Q4_0 if shape[-1] == 96 else Q8_0


def round_to_stored(model: torch.nn.Module) -> None:
    """Replace every matrix by its quantised and dequantised values."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            # As [..., out, in], the order in a file.
            turned = TRANSPOSED.get(model.config.model_type)
            rows = weight.mT if turned and turned.search(name) else weight
            kind, columns = kind_of(name, tuple(rows.shape)), np.arange(rows.shape[-1])
            if model.config.model_type.startswith("qwen3_5") and name.endswith("linear_attn.out_proj.weight"):
                # The converter reorders value heads before the file is quantised.
                keys, size = model.config.linear_num_key_heads, model.config.linear_value_head_dim
                columns = columns.reshape(keys, -1, size).swapaxes(0, 1).reshape(-1)
            if kind is not None:
                stored = np.ascontiguousarray(rows.numpy()[..., columns])
                values = gguf.quants.dequantize(gguf.quants.quantize(stored, kind), kind)
                rows.copy_(torch.from_numpy(values[..., np.argsort(columns)]))


def quantised_pair(family: str, directory: Path) -> Pair:
    """Return HF's model with the values of a quantised GGUF file, and that file."""
    config = IMPLIED.get(family, {}) | (FALCON_MULTIPLIERS if family == "falcon_h1" else {})
    oracle = hf.load(tiny_model(family, directory / "drawn", **config), threads=1)
    round_to_stored(oracle)
    oracle.save_pretrained(directory)
    tensors = {
        name: values if (kind := kind_of(name, values.shape)) is None else (values, kind)
        for name, values in tensors_of(directory, oracle.config).items()
    }
    path = directory / "model.gguf"
    write_gguf(path, GGUF_NAMES[family], metadata_of(oracle.config), tensors | rope_tensors(oracle.config))
    return Pair(oracle, open_checkpoint(path))


@pytest.fixture(scope="module", params=sorted(set(FAMILIES) - WITHOUT_GGUF))
def models(request, tmp_path_factory):
    return quantised_pair(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("lowering", ["portable", "kernels"])
def test_logits_are_those_of_hf_on_the_dequantised_weights(models, lowering):
    assert {"q8_0", "q4_0"} <= {tensor.codec for tensor in models.checkpoint.tensors.values()}
    tokens = prompt(models.checkpoint.config["vocab_size"], 34)
    assert_same_logits(models.ours(lowering), tokens, hf.logits(models.oracle, tokens))


# Types of a layer's matrices in turn, as in files of few bits, whose types differ by layer and matrix.
MIXED = (
    "iq2_xxs", "iq2_xs", "iq3_xxs", "q4_k", "iq1_s", "iq1_m", "iq2_s", "iq3_s", "q3_k", "q1_0", "nvfp4", "tq1_0", "q2_k",
)  # fmt: skip


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Return HF's model with the values of a GGUF file whose matrices have all of MIXED, and that file."""
    directory = tmp_path_factory.mktemp("mixed")
    config = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32}
    oracle = hf.load(tiny_model("qwen3", directory / "drawn", **config), threads=1)
    stored: dict[bytes, tuple[np.ndarray, str]] = {}  # by the values of a matrix: its blocks and type
    with torch.no_grad():
        matrices = [weight for name, weight in oracle.named_parameters() if weight.ndim == 2]
        for number, weight in enumerate(matrices):
            codec = MIXED[number % len(MIXED)]
            raw = raw_rows(codec, *weight.shape, seed=number)
            values = expected(codec, raw)
            weight.copy_(torch.from_numpy(values))
            stored[values.tobytes()] = raw, codec
    assert len(stored) > len(MIXED)
    oracle.save_pretrained(directory)
    tensors = {
        name: (found[0], gguf.GGMLQuantizationType[found[1].upper()]) if (found := stored.get(values.tobytes())) else values
        for name, values in tensors_of(directory, oracle.config).items()
    }
    path = directory / "model.gguf"
    write_gguf(path, "qwen3", metadata_of(oracle.config), tensors | rope_tensors(oracle.config))
    return Pair(oracle, open_checkpoint(path))


@pytest.mark.parametrize("lowering", ["portable", "kernels"])
def test_logits_of_a_file_of_many_types_are_those_of_hf(mixed, lowering):
    assert set(MIXED) <= {tensor.codec for tensor in mixed.checkpoint.tensors.values()}
    tokens = prompt(mixed.checkpoint.config["vocab_size"], 34)
    assert_same_logits(mixed.ours(lowering), tokens, hf.logits(mixed.oracle, tokens))
