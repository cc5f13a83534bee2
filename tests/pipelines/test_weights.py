"""--weights: which codec each tensor gets, and a whole model that is quantised on its way into a bundle."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest

from castiron.emitter.codecs import dequantise
from castiron.emitter.quantise import convert
from castiron.pipelines.casting.compile import Options, compile_model, stored
from castiron.pipelines.casting.weights import FLOATS, QUANTISED, WEIGHTS, codecs_of
from castiron.pipelines.checking.verify import load_reference
from castiron.pipelines.checkpoints import Checkpoint, CheckpointError, Tensor, open_checkpoint
from castiron.pipelines.commands import options
from castiron.pipelines.errors import PipelineError
from castiron.reference import hf, tiny
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session
from tests.pipelines.tiny_gguf import write_llama

PROMPT = np.random.default_rng(3).integers(3, 211, 40).tolist()


def checkpoint(shapes: dict[str, tuple[int, ...]], codec: str = "bf16", **config) -> Checkpoint:
    """Tensors of these shapes under HF's names without what they all share, with nothing in them."""
    names = {
        name if name.startswith(("model.", "lm_head")) else f"model.layers.{name}": shape for name, shape in shapes.items()
    }
    tensors = {name: Tensor(name, shape, codec, name, lambda: np.empty(0, np.uint8)) for name, shape in names.items()}
    return Checkpoint(Path("there"), "hf", config, tensors)


def short(codecs: dict[str, str]) -> dict[str, str]:
    return {name.removeprefix("model.layers."): codec for name, codec in codecs.items()}


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A llama in bf16 with rows of whole blocks of 256."""
    import torch

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "head_dim": 64}
    return tiny.tiny_model("llama", tmp_path_factory.mktemp("small") / "llama", dtype=torch.bfloat16, **sizes)


def test_the_command_line_names_what_there_is():
    assert options.WEIGHTS == WEIGHTS and options.QUANTISED == QUANTISED


def test_a_mix_is_that_of_llama_cpp(gemma3):
    """The file was made with llama.cpp's Q4_K_M, and most of its rows are no whole number of blocks of 256."""
    made = gemma3
    unquantised = replace(made, tensors={name: replace(t, codec="f32") for name, t in made.tensors.items()})
    assert codecs_of(unquantised, "q4_k_m") == {name: tensor.codec for name, tensor in made.tensors.items()}


# As llama_model_quantize of llama-cpp-python 0.3.36 types files of these shapes.
MORE_OF_9 = {0, 3, 6, 7, 8}


@pytest.mark.parametrize(("mix", "most"), [("q4_k_m", "q4_k"), ("q5_k_m", "q5_k")])
def test_a_mix_spends_more_on_values_and_down_projections_of_some_layers(mix, most):
    shapes = {
        f"{n}.{leaf}.weight": (256, 512) for n in range(9) for leaf in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj")
    }
    shapes |= {"model.embed_tokens.weight": (300, 256), "lm_head.weight": (300, 256)}
    codecs = short(codecs_of(checkpoint(shapes), mix))
    assert codecs["lm_head.weight"] == "q6_k" and codecs["model.embed_tokens.weight"] == most
    for n in range(9):
        assert codecs[f"{n}.self_attn.q_proj.weight"] == most
        assert {codecs[f"{n}.self_attn.v_proj.weight"], codecs[f"{n}.mlp.down_proj.weight"]} == {
            "q6_k" if n in MORE_OF_9 else most
        }
    tied = codecs_of(checkpoint(shapes, tie_word_embeddings=True), mix)
    assert tied["model.embed_tokens.weight"] == "q6_k"


def test_a_mix_of_fused_projections_and_of_eight_experts():
    fused = short(codecs_of(checkpoint({f"{n}.self_attn.qkv_proj.weight": (768, 256) for n in range(9)}), "q4_k_m"))
    assert [fused[f"{n}.self_attn.qkv_proj.weight"] for n in range(9)] == [
        "q6_k" if n in MORE_OF_9 else "q4_k" for n in range(9)
    ]
    leaves = (
        "self_attn.k_proj",
        "self_attn.v_proj",
        "self_attn.o_proj",
        "block_sparse_moe.gate",
        "block_sparse_moe.experts.3.w2",
    )
    shapes = {f"1.{leaf}.weight": (256, 256) for leaf in leaves}
    eight = short(codecs_of(checkpoint(shapes, num_local_experts=8), "q4_k_m"))
    assert list(eight.values()) == ["q8_0", "q8_0", "q5_k", "bf16", "q6_k"]


@pytest.mark.parametrize("weights", QUANTISED)
def test_what_is_no_matrix_keeps_its_codec(weights):
    kept = {
        "0.input_layernorm.weight": (256,), "0.self_attn.q_proj.bias": (256,), "0.mlp.gate.weight": (4, 256),
        "0.block_sparse_moe.router.layer.weight": (4, 256), "model.wpe.weight": (64, 256),
        "0.mlp.shared_expert_gate.weight": (1, 256), "0.conv.conv.weight": (256, 1, 4), "0.mlp.odd.weight": (64, 50),
    }  # fmt: skip
    quantised = {"0.mlp.gate_proj.weight": (64, 256), "0.mlp.experts.gate_up_proj": (4, 64, 256)}
    codecs = short(codecs_of(checkpoint(kept | quantised), weights))
    assert {codecs[name] for name in kept} == {"bf16"} and "bf16" not in {codecs[name] for name in quantised}


def test_rows_of_no_whole_blocks_of_256_take_a_type_with_smaller_ones():
    shapes = {"0.mlp.up_proj.weight": (64, 288)}
    found = {weights: codecs_of(checkpoint(shapes), weights).popitem()[1] for weights in QUANTISED}
    assert found == {"q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0", "q4_k_m": "q5_0", "q5_k_m": "q5_1"} | {
        name: name for name in ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1")
    }


@pytest.mark.parametrize("weights", FLOATS)
def test_floats_convert_every_matrix(weights):
    shapes = {"0.mlp.gate.weight": (4, 50), "0.norm.weight": (50,)}
    assert list(codecs_of(checkpoint(shapes, "q8_0"), weights).values()) == [weights, "q8_0"]


def test_what_is_quantised_already_is_not_quantised_again(tmp_path):
    import gguf

    q8 = gguf.GGMLQuantizationType.Q8_0
    path = write_llama(tmp_path / "m.gguf", tensors={"blk.0.attn_q.weight": (np.ones((64, 64), np.float32), q8)})
    with pytest.raises(CheckpointError, match="holds q8_0 already.*give the checkpoint in f32, bf16 or f16") as error:
        compile_model(path, tmp_path / "out", Options(context=16, weights="q4_0"))
    assert "\n" not in str(error.value) and not (tmp_path / "out").exists()


def test_numbers_that_cannot_be_quantised_name_their_tensor(tmp_path):
    path = write_llama(tmp_path / "m.gguf", tensors={"blk.1.ffn_up.weight": np.full((96, 64), np.inf, np.float32)})
    with pytest.raises(CheckpointError, match="model.layers.1.mlp.up_proj.weight: a number is infinite.*q4_0 has no code"):
        stored(open_checkpoint(path), "model.layers.1.mlp.up_proj.weight", "q4_0")


def test_a_quantised_bundle_gives_hfs_tokens_with_weights_so_quantised(small, tmp_path):
    weights = "q4_k_m"
    made = compile_model(small, tmp_path / weights, Options(context=56, weights=weights, batch=(), speculate=()))
    bundle = open_bundle(made.bundle)
    oracle = load_reference(small, weights, 1)
    expected = hf.greedy(oracle, PROMPT, 12)
    session = Session(bundle, 1)
    found = [session.prefill(PROMPT)]
    while len(found) < 12:
        found.append(session.step(found[-1]))
    assert min(expected.margins) > 1e-4 and found == expected.tokens
    manifest = bundle.manifest
    wanted = codecs_of(open_checkpoint(small), weights)
    assert manifest.weights == weights
    assert manifest.codecs == {codec: list(wanted.values()).count(codec) for codec in sorted(set(wanted.values()))}
    elements = sum(prod(tensor.shape) for tensor in open_checkpoint(small).tensors.values())
    assert made.files["weights.irpa"] < 0.8 * elements + 40_000


def test_the_reference_is_quantised_matrix_by_matrix(small):
    plain, rounded = hf.load(small, 1), load_reference(small, "q4_k_m", 1)
    codecs = codecs_of(open_checkpoint(small), "q4_k_m")
    assert set(codecs.values()) == {"bf16", "q4_k", "q6_k"}
    for (name, a), b in zip(plain.named_parameters(), rounded.parameters(), strict=True):
        a, b = a.detach().numpy(), b.detach().numpy()
        wanted = dequantise(codecs[name], convert("f32", a.view(np.uint8), codecs[name])) if a.ndim > 1 else a
        assert np.array_equal(b, wanted), name


def test_matrices_that_transformers_holds_transposed_are_quantised_as_they_are_read(tmp_path):
    path = tiny.tiny_model("gpt2", tmp_path / "gpt2")
    checkpoint, rounded = open_checkpoint(path), load_reference(path, "q4_0", 1)
    name = "transformer.h.1.mlp.c_fc.weight"
    tensor = checkpoint.tensors[name]
    wanted = dequantise("q4_0", convert(tensor.codec, tensor.data, codecs_of(checkpoint, "q4_0")[name]))
    assert np.array_equal(rounded.get_parameter(name).detach().numpy(), wanted.T) and wanted.shape[0] != wanted.shape[1]


def test_experts_that_transformers_fuses_are_refused_in_a_sentence(tmp_path):
    path = tiny.tiny_model("mixtral", tmp_path / "mixtral")
    with pytest.raises(PipelineError, match="castiron evaluate --against hf"):
        load_reference(path, "q8_0", 1)
