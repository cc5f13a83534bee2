"""Quantised HF checkpoints: their weights keep codes and scales, and the model is HF's with these weights."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import safetensors.torch
import torch
from safetensors.numpy import load_file, save_file

from castiron.emitter.graph.types import EmitError
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, check_finite, missing_and_left_over
from castiron.pipelines.checkpoints.column_order import column_orders
from castiron.pipelines.checkpoints.hf.open_directory import tensors_of
from castiron.pipelines.checkpoints.hf.quantised_weights import quantised_weights
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.build_model import build_model
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.evaluate.verify import load_reference
from castiron.reference import hf
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session
from tests.emitter.family_harness import Pair, assert_same_logits, prompt
from tests.support.hf_quantised import SCHEMES, quantise
from tests.test_end_to_end import greedy

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 2}
# Dense models without and with biases, and one of experts.
FAMILIES = {"llama": {}, "qwen2": {}, "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}}
QUICK = (
    "gptq 4",
    "awq",
    "compressed-tensors int4 asymmetric",
    "compressed-tensors fp8",
    "fp8",
    "nvfp4",
    "nf4 nested",
    "bitsandbytes int8",
)


def made(tmp_path, scheme: str, family: str = "llama", **sizes):
    return quantise(tiny_model(family, tmp_path / "model", **{**SIZES, **FAMILIES[family], **sizes}), SCHEMES[scheme])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_those_of_the_definition(scheme, tmp_path):
    quantised, plain = (open_checkpoint(path) for path in made(tmp_path, scheme))
    assert {name for name in quantised.tensors if not name.endswith((".bias", ".column_order"))} == plain.tensors.keys()
    codecs = {quantised.tensors[name].codec for name in plain.tensors if ".layers." in name and "norm" not in name}
    assert codecs == {SCHEMES[scheme].codec}
    for name, tensor in plain.tensors.items():
        found = quantised.tensors[name]
        values = tensor.dequantise()
        if order := quantised.column_orders.get(name):
            values = values[:, quantised.tensors[order].dequantise().astype(int)]
        assert found.codec == "f32" or ".layers." in name
        # nvfp4 has three factors, whose products are rounded in another order.
        np.testing.assert_allclose(found.dequantise(), values, rtol=3e-7 if "nvfp4" in scheme else 0, atol=0)


# By bits and version of zero points: sha256 of the f32 [out, in] that GPTQModel 7.7.0's `TorchLinear.dequantize_weight`
# returns for these parts, with scales converted to f32.
OF_GPTQMODEL = {
    (4, 1): "d161691d4d0086ad4ac20f1e28373162b627e5db4fc167a1b1354678cc29f06c",
    (8, 2): "9dada8cdc298f8c3908552d5272877ed9e89740eb16dd3135beea0623343d455",
}


@pytest.mark.parametrize(("bits", "version"), OF_GPTQMODEL)
def test_weights_of_gptq_are_those_of_gptqmodel(bits, version, tmp_path):
    rng = np.random.default_rng(bits)
    words = lambda *shape: rng.integers(0, 1 << 32, shape, np.uint32)
    # GPTQModel adds 1 to the zero points of version 1 without a carry to the next one.
    parts = {"qweight": words(4 * bits, 32).view(np.int32), "qzeros": (words(4, bits) & 0x77777777).view(np.int32)}
    parts["scales"] = rng.random((4, 32), np.float32).astype(np.float16)
    parts["g_idx"] = rng.permutation(np.repeat(np.arange(4, dtype=np.int32), 32))
    save_file({f"x.{part}": values for part, values in parts.items()}, tmp_path / "model.safetensors")
    form = {"checkpoint_format": "gptq" if version == 1 else "gptq_v2", "group_size": 32}
    config = {"quant_method": "gptq", "bits": bits, "sym": False, "desc_act": True, **form}
    tensors, orders = column_orders(quantised_weights(tmp_path, config, tensors_of(tmp_path, True))[0])
    order = tensors[orders["x.weight"]].dequantise()
    values = np.ascontiguousarray(tensors["x.weight"].dequantise()[:, np.argsort(order)])
    assert hashlib.sha256(values.tobytes()).hexdigest() == OF_GPTQMODEL[bits, version]


@pytest.mark.parametrize(
    ("scheme", "config"),
    [
        *(("auto-round", {"quant_method": name}) for name in ("auto_round", "autoround", "intel/auto-round")),
        ("auto-round", {"backend": "auto_round:gptq:exllamav2", "packing_format": None}),
        ("auto-round", {"packing_format": None}),
        ("auto-round asymmetric v2", {"packing_format": "auto_round:gptqmodel"}),
        ("gptq 4 v2 named gptq", {"sym": None, "checkpoint_format": None}),
        ("modelopt nvfp4", {"quant_method": "modelopt_fp4", "quant_algo": None}),
    ],
)
def test_other_names_of_a_method_give_the_same_weights(scheme, config, tmp_path):
    """Without `sym` and `checkpoint_format`, the zero points show that a weight is symmetric."""
    directory, _ = made(tmp_path, scheme, num_hidden_layers=1)
    expected = open_checkpoint(directory)
    found = open_checkpoint(changed(directory, tmp_path / "other", config))
    for name, tensor in expected.tensors.items():
        assert np.array_equal(found.tensors[name].dequantise(), tensor.dequantise()), name


def test_a_layer_may_have_its_own_sym(tmp_path):
    """AutoRound states it in extra_config, and GPTQModel in dynamic, by regular expressions."""
    directory, _ = made(tmp_path, "auto-round asymmetric", num_hidden_layers=1)
    expected = open_checkpoint(directory)
    for key, pattern in (("extra_config", r"layers\.0\."), ("dynamic", r"+:.*\.0\..*"), ("extra_config", "[")):
        config = {"sym": True, key: {pattern: {"sym": False}}, "bits": 4}
        found = open_checkpoint(changed(directory, tmp_path / f"{key}{len(pattern)}", config))
        assert found.tensors["model.layers.0.mlp.up_proj.weight"].codec == ("int4_64_f16" if pattern == "[" else "uint4_64_f16")
        if pattern == "[":
            with pytest.raises(CheckpointError, match="zero points other than 8, although `sym` is true"):
                check_finite(found)
        else:
            assert all(np.array_equal(t.dequantise(), expected.tensors[n].dequantise()) for n, t in found.tensors.items())


def test_a_config_file_of_modelopt_is_read(tmp_path):
    directory, plain = made(tmp_path, "modelopt fp8", num_hidden_layers=1)
    config = json.loads((directory / "config.json").read_text())
    stated = {"quantization": {"quant_algo": config.pop("quantization_config")["quant_algo"], "exclude_modules": ["lm_head"]}}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError):
        open_checkpoint(directory)
    (directory / "hf_quant_config.json").write_text(json.dumps({"producer": {"name": "modelopt"}, **stated}))
    assert all(
        np.array_equal(tensor.dequantise(), open_checkpoint(plain).tensors[name].dequantise())
        for name, tensor in open_checkpoint(directory).tensors.items()
    )


# By class of AutoRound 0.16.1 and ModelOpt 0.47.0: config, and sha256 of the weight f32 [out, in] that its own code for
# dequantisation returns for the parts in `packed`, with scales converted to f32.
OF_LIBRARIES = {
    "qlinear_torch": (
        {"packing_format": "auto_round", "sym": False},
        "21b0aaa9e9fe624900fdbc1c9304a2a02bf95bb3528e9e30933b5fb2f03fc725",
    ),
    "qlinear_torch_zp": (
        {"packing_format": "auto_round:auto_gptq", "sym": False},
        "a6fd39c3aa11a50691f46593c13545466d09f671af8e73e50209b7685d7e31f2",
    ),
    "NVFP4QTensor": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "412b03335a42a00c1b7a0099012dd000916385f45e43755e95a10afac0a8fe11",
    ),
}


def packed(library: str) -> dict:
    rng = np.random.default_rng(7)
    words = lambda *shape: rng.integers(0, 1 << 32, shape, np.uint32).view(np.int32)
    if library == "NVFP4QTensor":
        scales = torch.from_numpy(rng.uniform(0.1, 400, (32, 8)).astype(np.float32)).to(torch.float8_e4m3fn)
        codes = torch.from_numpy(rng.integers(0, 256, (32, 64), np.uint8))
        return {"weight": codes, "weight_scale": scales, "weight_scale_2": torch.tensor(2**-9)}
    # AutoRound adds 1 to the zero points of version 1 without a carry to the next one.
    parts = {"qweight": words(16, 32), "qzeros": words(4, 4) & 0x77777777}
    return {key: torch.from_numpy(part) for key, part in parts.items()} | {
        "scales": torch.from_numpy(rng.random((4, 32), np.float32)).half()
    }


@pytest.mark.parametrize("library", OF_LIBRARIES)
def test_weights_are_those_of_the_libraries(library, tmp_path):
    config, expected = OF_LIBRARIES[library]
    safetensors.torch.save_file(
        {f"x.{part}": values for part, values in packed(library).items()}, tmp_path / "model.safetensors"
    )
    found, _ = quantised_weights(tmp_path, {"quant_method": "auto-round", "bits": 4, **config}, tensors_of(tmp_path, True))
    assert hashlib.sha256(found["x.weight"].dequantise().tobytes()).hexdigest() == expected


def assert_logits_of_hf(scheme: str, family: str, lowering: str, directory) -> None:
    quantised, plain = made(directory, scheme, family)
    oracle, checkpoint = hf.load(plain, threads=1), open_checkpoint(quantised)
    tokens = prompt(checkpoint.config["vocab_size"], 30)
    assert_same_logits(Pair(oracle, checkpoint).ours(lowering), tokens, hf.logits(oracle, tokens))


@pytest.mark.parametrize("scheme", QUICK)
def test_logits_are_those_of_hf_with_these_weights(scheme, tmp_path):
    assert_logits_of_hf(scheme, "qwen3_moe", "portable", tmp_path)


@pytest.mark.parametrize("scheme", ["gptq desc_act", "nf4 nested", "compressed-tensors int4", "auto-round", "modelopt fp8"])
def test_verify_needs_no_library_of_the_method(scheme, tmp_path):
    """The reference model has the weights in f32, with columns in the order of x."""
    quantised, plain = made(tmp_path, scheme)
    expected = hf.load(plain, threads=1).state_dict()
    found = load_reference(quantised, "native", 1).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


@pytest.mark.parametrize("scheme", ["gptq desc_act", "gptq desc_act asymmetric"])
def test_logits_with_columns_in_the_order_of_activations(scheme, tmp_path):
    assert_logits_of_hf(scheme, "qwen2", "kernels", tmp_path)


def test_layers_with_one_order_share_it(tmp_path):
    """In both layers of the model, matrices of one shape have the same order."""
    checkpoint = open_checkpoint(made(tmp_path, "gptq desc_act")[0])
    assert len(checkpoint.column_orders) == 14 and len(set(checkpoint.column_orders.values())) == 4
    assert sum(name.endswith("column_order") for name in checkpoint.tensors) == 4


@pytest.mark.parametrize("lowering", ["portable", "kernels"])
def test_logits_of_experts_with_columns_in_the_order_of_activations(lowering, tmp_path):
    """The order differs by expert; gate and up of an expert have the same."""
    quantised, plain = made(tmp_path, "gptq desc_act", "qwen3_moe")
    checkpoint = open_checkpoint(quantised)
    used = {order for name, order in checkpoint.column_orders.items() if ".experts." in name}
    assert len(used) == 2 * 4
    tokens = prompt(checkpoint.config["vocab_size"], 30)
    oracle = hf.load(plain, threads=1)
    assert_same_logits(Pair(oracle, checkpoint).ours(lowering), tokens, hf.logits(oracle, tokens))


def test_gate_and_up_of_an_expert_with_different_orders_are_rejected(tmp_path):
    checkpoint = open_checkpoint(made(tmp_path, "gptq desc_act", "qwen3_moe")[0])
    name = "model.layers.0.mlp.experts.1.{}_proj.weight"
    orders = dict(checkpoint.column_orders)
    orders[name.format("gate")] = orders[name.format("down")]
    with pytest.raises(EmitError, match="cannot apply the column orders of .*experts.0.gate_proj"):
        build_model(replace(checkpoint, column_orders=orders), Options(context=64))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", [name for name in SCHEMES if "desc_act" not in name])
def test_logits_of_every_scheme_and_family_are_those_of_hf(scheme, family, tmp_path):
    assert_logits_of_hf(scheme, family, "kernels", tmp_path)


def assert_tokens_of_hf(scheme: str, family: str, directory) -> None:
    """Compile a bundle, and compare greedy tokens."""
    quantised, plain = made(directory, scheme, family)
    options = Options(context=64, batch=(2,), verify_widths=(), prefill=(16,))
    bundle = open_bundle(compile_model(quantised, directory / "bundle", options).bundle)
    assert bundle.manifest.codecs[SCHEMES[scheme].codec] >= 14
    tokens = prompt(211, 20)
    assert greedy(Session(bundle, 1), tokens, 16) == hf.greedy(hf.load(plain, threads=1), tokens, 16).tokens


@pytest.mark.parametrize(
    ("scheme", "family"), [("compressed-tensors int4 asymmetric", "qwen3_moe"), ("gptq desc_act", "llama")]
)
def test_a_bundle_gives_the_tokens_of_hf(scheme, family, tmp_path):
    assert_tokens_of_hf(scheme, family, tmp_path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scheme", QUICK)
def test_bundles_of_every_method_give_the_tokens_of_hf(scheme, family, tmp_path):
    assert_tokens_of_hf(scheme, family, tmp_path)


@pytest.fixture(scope="module")
def gptq_directory(tmp_path_factory):
    return made(tmp_path_factory.mktemp("gptq"), "gptq 4")[0]


def changed(directory, path, config=(), **tensors):
    """Copy a directory with other values of its quantization_config, and tensors of layer 0's up_proj."""
    path.mkdir()
    content = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    content["quantization_config"] = {k: v for k, v in (content["quantization_config"] | dict(config)).items() if v is not None}
    (path / "config.json").write_text(json.dumps(content), encoding="utf-8")
    if not tensors:
        shutil.copy(directory / "model.safetensors", path)
        return path
    stored = load_file(directory / "model.safetensors")
    for part, change in tensors.items():
        name = f"model.layers.0.mlp.up_proj.{part}"
        value = change(stored.pop(name))
        stored |= {} if value is None else {name: np.ascontiguousarray(value)}
    save_file(stored, path / "model.safetensors")
    return path


def test_scales_of_activations_and_of_the_cache_are_left_out(tmp_path):
    directory, _ = made(tmp_path, "compressed-tensors fp8")
    with_float8 = directory / "model.safetensors"
    scales = {f"model.layers.{n}.self_attn.{name}_scale": torch.ones(1) for n in (0, 1) for name in ("k", "v")}
    safetensors.torch.save_file(safetensors.torch.load_file(with_float8) | scales, with_float8)
    checkpoint = open_checkpoint(directory)
    assert checkpoint.left_out == {"input_scale": 14, "k_scale": 2, "v_scale": 2}
    assert not any("_scale" in name for name in checkpoint.tensors)


def test_biases_of_zeros_are_ignored_and_others_are_not(gptq_directory, tmp_path):
    checkpoint = open_checkpoint(gptq_directory)
    required = {name: tensor.shape for name, tensor in checkpoint.tensors.items() if not name.endswith(".bias")}
    assert len(required) < len(checkpoint.tensors) and not missing_and_left_over(required, checkpoint)
    other = open_checkpoint(changed(gptq_directory, tmp_path / "other", bias=lambda bias: bias + 1))
    assert missing_and_left_over(required, other) == ["model.layers.0.mlp.up_proj.bias [256] is left over"]


REJECTED = {
    "an unknown method": ({"quant_method": "aqlm"}, {}, "unsupported quant_method: 'aqlm'; supported are auto-round, .*gptq"),
    "another packing": (
        {"checkpoint_format": "marlin"},
        {},
        "unsupported checkpoint_format: 'marlin'; supported are gptq, gptq_v2",
    ),
    "awq's other packing": ({"quant_method": "awq", "version": "gemv"}, {}, "unsupported version: 'gemv'; supported are gemm"),
    "auto-round for mlx": (
        {"quant_method": "auto-round", "packing_format": "auto_round:mlx"},
        {},
        "unsupported packing_format: 'auto_round:mlx'; supported are auto_round, .*auto_round:auto_awq",
    ),
    "modelopt with scaled inputs": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"},
        {},
        "unsupported quant_algo: 'NVFP4_AWQ'; supported are FP8, .*NVFP4",
    ),
    "no method": ({"quant_method": None}, {}, "unsupported quant_method: None"),
    "an unknown format": (
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        {},
        "unsupported format: 'marlin-24'; supported are .*pack-quantized",
    ),
    "a missing part": ({}, {"scales": lambda part: None}, "is inconsistent: .*up_proj.weight: scales is missing"),
    "3 bits": (
        {},
        {"qzeros": lambda part: np.zeros((1, 24), np.int32)},
        "3 bits are unsupported; supported are 4 and 8 for gptq",
    ),
    "a part of another shape": (
        {},
        {"scales": lambda part: part[:, :-8]},
        r"up_proj.weight: qweight \[16, 256\] and qzeros \[1, 32\] do not fit scales \[1, 248\]",
    ),
    "groups of other sizes": (
        {},
        {"g_idx": lambda part: part + np.arange(128, dtype=np.int32) % 2},
        "g_idx does not divide the 128 columns into 1 equal groups",
    ),
}


@pytest.mark.parametrize("name", REJECTED)
def test_malformed_checkpoints_end_in_one_line(name, gptq_directory, tmp_path):
    config, tensors, message = REJECTED[name]
    with pytest.raises(CheckpointError, match=message) as found:
        open_checkpoint(changed(gptq_directory, tmp_path / "model", config, **tensors))
    assert "\n" not in str(found.value)


def test_a_shape_of_bytes_is_rejected(tmp_path):
    directory, _ = made(tmp_path, "compressed-tensors int4 channel")
    path = changed(directory, tmp_path / "other", weight_shape=lambda shape: shape.astype(np.uint8))
    with pytest.raises(CheckpointError, match=r"weight_packed \[256, 16\] does not fit weight_shape \[\]"):
        open_checkpoint(path)


def test_zero_points_that_contradict_the_config_are_rejected(gptq_directory, tmp_path):
    """A weight whose zero points are neither all 8 nor all 7 is not symmetric in either version."""
    mixed = lambda part: np.where(np.arange(part.size).reshape(part.shape) % 2, 0x77777777, 0x88888888 - (1 << 32)).astype(
        np.int32
    )
    checkpoint = open_checkpoint(changed(gptq_directory, tmp_path / "model", qzeros=mixed))
    with pytest.raises(CheckpointError, match="up_proj.weight: qzeros has zero points other than 8, although `sym` is true"):
        check_finite(checkpoint)


def test_inspect_names_the_fields_of_the_config(gptq_directory, capsys):
    assert cli.main(["inspect", str(gptq_directory)]) == 0
    shown = capsys.readouterr().out
    assert "gptq, bits 4, group_size 128, sym true, desc_act false, checkpoint_format gptq" in shown
    assert "14 int4_128_f16" in shown
