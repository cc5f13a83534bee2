"""--weights: the codec of each tensor, and a bundle of a model that is quantised."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from castiron.emitter.abi import FLOATS, MIXES, QUANTISED
from castiron.emitter.codecs import dequantise
from castiron.emitter.codecs.quantise import ENCODERS, convert
from castiron.pipelines.checkpoints.checkpoint import Checkpoint, CheckpointError, Tensor
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.weight_codecs import codecs_of, convert_tensor
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate.verify import load_reference
from castiron.reference import hf, tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session
from tests.support.tiny_gguf import write_llama
from tests.test_end_to_end import greedy

PROMPT = np.random.default_rng(3).integers(3, 211, 40).tolist()


def checkpoint(shapes: dict[str, tuple[int, ...]], codec: str = "bf16", **config) -> Checkpoint:
    """Return a checkpoint of empty tensors; names without `model.` are below `model.layers.`."""
    names = {
        name if name.startswith(("model.", "lm_head")) else f"model.layers.{name}": shape for name, shape in shapes.items()
    }
    tensors = {name: Tensor(name, shape, codec, name, lambda: np.empty(0, np.uint8)) for name, shape in names.items()}
    return Checkpoint(Path("there"), "hf", config, tensors)


def short(codecs: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("model.layers."): codec for name, codec in codecs.items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A llama in bf16 whose rows are multiples of 256."""
    import torch

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    return tiny.tiny_model("llama", tmp_path_factory.mktemp("small") / "llama", dtype=torch.bfloat16, **sizes)


def test_every_quantised_type_has_an_encoder():
    assert (*ENCODERS, *MIXES) == QUANTISED


def test_a_mix_is_that_of_llama_cpp(gemma3):
    """llama.cpp made the file as Q4_K_M; most of its rows are not multiples of 256."""
    made = gemma3
    unquantised = replace(made, tensors={name: replace(t, codec="f32") for name, t in made.tensors.items()})
    assert codecs_of(unquantised, "q4_k_m") == {name: tensor.codec for name, tensor in made.tensors.items()}


# As llama_model_quantize of llama-cpp-python 0.3.36 types files of these shapes.
MORE_OF_9 = {0, 3, 6, 7, 8}


@pytest.mark.parametrize(("mix", "base"), [("q4_k_m", "q4_k"), ("q5_k_m", "q5_k")])
def test_a_mix_spends_more_on_values_and_down_projections_of_some_layers(mix, base):
    shapes = {
        f"{n}.{leaf}.weight": (256, 512) for n in range(9) for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    shapes |= {"model.embed_tokens.weight": (300, 256), "lm_head.weight": (300, 256)}
    codecs = short(codecs_of(checkpoint(shapes), mix))
    assert codecs["lm_head.weight"] == "q6_k" and codecs["model.embed_tokens.weight"] == base
    for n in range(9):
        assert codecs[f"{n}.self_attn.q_proj.weight"] == base
        assert {codecs[f"{n}.self_attn.v_proj.weight"], codecs[f"{n}.mlp.down_proj.weight"]} == {
            "q6_k" if n in MORE_OF_9 else base
        }
    tied = codecs_of(checkpoint(shapes, tie_word_embeddings=True), mix)
    assert tied["model.embed_tokens.weight"] == "q6_k"


def test_a_mix_of_fused_projections_and_of_eight_experts():
    fused = short(codecs_of(checkpoint({f"{n}.self_attn.qkv_proj.weight": (768, 256) for n in range(9)}), "q4_k_m"))
    assert [fused[f"{n}.self_attn.qkv_proj.weight"] for n in range(9)] == [
        "q6_k" if n in MORE_OF_9 else "q4_k" for n in range(9)
    ]
    attention, experts = ("k_proj", "v_proj", "o_proj"), ("gate", "experts.3.w2")
    leaves = [f"self_attn.{leaf}" for leaf in attention] + [f"block_sparse_moe.{leaf}" for leaf in experts]
    shapes = {f"1.{leaf}.weight": (256, 256) for leaf in leaves}
    eight = short(codecs_of(checkpoint(shapes, num_local_experts=8), "q4_k_m"))
    assert list(eight.values()) == ["q8_0", "q8_0", "q5_k", "bf16", "q6_k"]


@pytest.mark.parametrize("weights", QUANTISED)
def test_vectors_and_small_matrices_keep_their_codec(weights):
    stored = {
        "0.input_layernorm.weight": (256,), "0.self_attn.q_proj.bias": (256,), "0.mlp.gate.weight": (4, 256),
        "0.block_sparse_moe.router.layer.weight": (4, 256), "model.wpe.weight": (64, 256),
        "0.mlp.shared_expert_gate.weight": (1, 256), "0.conv.conv.weight": (256, 1, 4), "0.mlp.odd.weight": (64, 50),
    }  # fmt: skip
    quantised = {"0.mlp.gate_proj.weight": (64, 256), "0.mlp.experts.gate_up_proj": (4, 64, 256)}
    codecs = short(codecs_of(checkpoint(stored | quantised), weights))
    assert {codecs[name] for name in stored} == {"bf16"} and "bf16" not in {codecs[name] for name in quantised}


def test_rows_that_blocks_of_256_do_not_fit_take_smaller_blocks():
    shapes = {"0.mlp.up_proj.weight": (64, 288)}
    found = {weights: codecs_of(checkpoint(shapes), weights).popitem()[1] for weights in QUANTISED}
    assert found == {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q4_k_m": "q5_0", "q5_k_m": "q5_1"} | {
        name: name for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
    }
    for weights in FLOATS:
        assert list(codecs_of(checkpoint(shapes | {"0.norm.weight": (50,)}, "q8_0"), weights).values()) == [weights, "q8_0"]


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path):
    import gguf

    q8 = gguf.GGMLQuantizationType.Q8_0
    path = write_llama(tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": (np.ones((64, 64), np.float32), q8)})
    with pytest.raises(CheckpointError, match="is already quantised to q8_0.*give the checkpoint in f32, bf16 or f16") as error:
        compile_model(path, tmp_path / "out", Options(context=16, weights="q4_0"))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_quantised_matrices_are_requantised_only_if_that_makes_them_smaller():
    stored = {"0.mlp.up_proj.weight": "q8_0", "0.mlp.gate_proj.weight": "q2_k", "0.mlp.down_proj.weight": "bf16"}
    made = checkpoint(dict.fromkeys(stored, (64, 256)))
    tensors = {name: replace(t, codec=codec) for (name, t), codec in zip(made.tensors.items(), stored.values())}
    codecs = short(codecs_of(replace(made, tensors=tensors), "q4_0", requantise=True))
    assert list(codecs.values()) == ["q4_0", "q2_k", "q4_0"]


def test_infinite_numbers_name_their_tensor(tmp_path):
    path = write_llama(tmp_path / "m.gguf", tensors={"blk.1.ffn_up.weight": np.full((96, 64), np.inf, np.float32)})
    with pytest.raises(
        CheckpointError, match="model.layers.1.mlp.up_proj.weight .* to q4_0: q4_0 cannot store infinity or NaN"
    ):
        convert_tensor(open_checkpoint(path).tensors["model.layers.1.mlp.up_proj.weight"], "q4_0", path)


def test_a_quantised_bundle_gives_hfs_tokens(small, tmp_path):
    weights = "q4_k_m"
    made = compile_model(small, tmp_path / weights, Options(context=56, weights=weights, batch=(), verify_widths=()))
    bundle = open_bundle(made.bundle)
    oracle = load_reference(small, weights, 1)
    expected = hf.greedy(oracle, PROMPT, 12)
    found = greedy(Session(bundle, 1), PROMPT, 12)
    assert min(expected.margins) > 1e-4 and found == expected.tokens
    manifest = bundle.manifest
    wanted = codecs_of(open_checkpoint(small), weights)
    assert manifest.weights == weights
    assert manifest.codecs == {codec: list(wanted.values()).count(codec) for codec in sorted(set(wanted.values()))}
    elements = sum(prod(tensor.shape) for tensor in open_checkpoint(small).tensors.values())
    assert manifest.files["weights.irpa"].size < 0.8 * elements + 40_000


def test_the_reference_is_quantised_matrix_by_matrix(small):
    plain, rounded = hf.load(small, 1), load_reference(small, "q4_k_m", 1)
    codecs = codecs_of(open_checkpoint(small), "q4_k_m")
    assert set(codecs.values()) == {"bf16", "q4_k", "q6_k"}
    for (name, a), b in zip(plain.named_parameters(), rounded.parameters(), strict=True):
        a, b = a.detach().numpy(), b.detach().numpy()
        wanted = dequantise(codecs[name], convert("f32", a.view(np.uint8), codecs[name])) if a.ndim > 1 else a
        assert np.array_equal(b, wanted), name


def test_transposed_matrices_are_quantised_as_they_are_read(tmp_path):
    path = tiny.tiny_model("gpt2", tmp_path / "gpt2")
    checkpoint, rounded = open_checkpoint(path), load_reference(path, "q4_0", 1)
    name = "transformer.h.1.mlp.c_fc.weight"
    tensor = checkpoint.tensors[name]
    wanted = dequantise("q4_0", convert(tensor.codec, tensor.data, codecs_of(checkpoint, "q4_0")[name]))
    assert np.array_equal(rounded.get_parameter(name).detach().numpy(), wanted.T) and wanted.shape[0] != wanted.shape[1]


def test_fused_experts_have_no_quantised_reference(tmp_path):
    path = tiny.tiny_model("mixtral", tmp_path / "mixtral")
    with pytest.raises(PipelineError, match="castiron evaluate --against hf"):
        load_reference(path, "q8_0", 1)
