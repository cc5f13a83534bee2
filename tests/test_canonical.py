"""Logits have the same bits in any chunks and batches and on every CPU, with canonical numerics on all.

Every machine that runs these tests must have the hashes of canonical_bits.json. After an intended
change of the order of sums, `python -m tests.test_canonical` writes them again.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from castiron.emitter.graph.types import EmitError
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.reference.tiny import tiny_model
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.encoder import Encoder
from castiron.vmfb.run.session import Session
from castiron.vmfb.targets import missing_features, resolve
from tests.every_way import check_every_way, check_prompts, decoded, digest, same
from tests.support import encoders

HASHES = Path(__file__).with_name("canonical_bits.json")
VOCAB, HIDDEN, HEADS, HEAD_DIM, INNER, LAYERS = 97, 64, 3, 64, 96, 2
# Long enough that threads share the positions of a context.
PROMPT = np.random.default_rng(0).integers(0, VOCAB, 104).tolist()
# By storage type: options, and targets besides the host that must give the same bits.
WAYS = {"f32": ({}, ("x86-64-v3",)), "q8_0": ({"weights": "q8_0", "kv_cache_type": "f16"}, ())}


def checkpoint(directory: Path) -> Path:
    """Write a llama whose weights are small integers over a power of two, the same on any machine."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(1)
    drawn = lambda *shape: (rng.integers(-64, 65, shape) / 256).astype(np.float32)
    weights = {"model.embed_tokens.weight": drawn(VOCAB, HIDDEN) * 4, "model.norm.weight": 1 + drawn(HIDDEN)}
    weights["lm_head.weight"] = drawn(VOCAB, HIDDEN)
    for i in range(LAYERS):
        layer = {f"self_attn.{name}_proj": drawn(HEADS * HEAD_DIM, HIDDEN) for name in "qkv"}
        layer["self_attn.o_proj"] = drawn(HIDDEN, HEADS * HEAD_DIM)
        layer |= {f"mlp.{name}_proj": drawn(INNER, HIDDEN) for name in ("gate", "up")}
        layer["mlp.down_proj"] = drawn(HIDDEN, INNER)
        layer |= {name: 1 + drawn(HIDDEN) for name in ("input_layernorm", "post_attention_layernorm")}
        weights |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    save_file(weights, directory / "model.safetensors")
    config = {
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": False, "hidden_act": "silu", "eos_token_id": 0,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def compile_bundle(checkpoint: Path, out: Path, **options) -> Path:
    options = {"context": 112, "batch": (3,), "verify_widths": (4,), "numerics": "canonical", **options}
    return compile_model(checkpoint, out, Options(**options)).bundle


@pytest.mark.parametrize("way", WAYS)
def test_every_way_and_every_cpu_gives_the_same_bits(way, tmp_path):
    (options, targets), wanted = WAYS[way], json.loads(HASHES.read_text())[way]
    made = checkpoint(tmp_path / "checkpoint")
    logits = check_every_way(compile_bundle(made, tmp_path / "host", **options), PROMPT)
    assert digest(logits) == wanted
    for target in targets:
        if not missing_features(resolve(target)):
            other = compile_bundle(made, tmp_path / target, target=target, batch=(), verify_widths=(), **options)
            assert digest(check_prompts(other, PROMPT)) == wanted, target


# By storage type: targets whose default numerics give these bits, and one whose default does not.
DEFAULTS = {"f32": (("x86-64-v3", "x86-64-v4"), "sapphirerapids"), "q8_0": (("x86-64-v3-vnni", "x86-64-v4-vnni"), "x86-64-v3")}


@pytest.mark.parametrize("way", WAYS)
def test_the_default_has_these_bits_too(way, tmp_path):
    (options, _), wanted, (targets, other) = WAYS[way], json.loads(HASHES.read_text())[way], DEFAULTS[way]
    made = checkpoint(tmp_path / "checkpoint")
    for target in (*targets, other):
        path = compile_bundle(made, tmp_path / target, target=target, numerics="exact", batch=(), verify_widths=(), **options)
        assert open_bundle(path).manifest.has_same_bits == (target != other), target
        if target != other and not missing_features(resolve(target)):
            assert digest(check_prompts(path, PROMPT)) == wanted, target


# Soft caps and windows; scans and norms of groups; the delta rule and experts; rotary embedding before a norm; norms of rows.
FAMILIES = {
    "gemma2": {},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "full_attention", "moe"]},
    "qwen3_5_moe_text": {},
    "hunyuan_v1_dense": {},
    "olmo2": {},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_layer_keeps_its_bits(family, tmp_path):
    made = tiny_model(family, tmp_path / "checkpoint", **FAMILIES[family])
    path = compile_bundle(made, tmp_path / "bundle", context=31, kv_cache_type="q8_0", batch=(), verify_widths=())
    check_prompts(path, np.random.default_rng(2).integers(3, 200, 28).tolist())


def test_a_text_has_one_vector_whatever_its_call_takes(tmp_path):
    """Other widths, threads and vector units give the same bits with bidirectional attention."""
    sizes = {"num_hidden_layers": 2, "local_attention": 64, "global_attn_every_n_layers": 2}
    made = encoders.write("modernbert", tmp_path / "model", pooling="mean", longest=100, **sizes)
    v3 = "host" if missing_features(resolve("x86-64-v3")) else "x86-64-v3"
    options = {"context": 100, "batch": (), "verify_widths": ()}
    one = Encoder(compile_bundle(made, tmp_path / "one", embed=(72,), **options), 2)
    other = Encoder(compile_bundle(made, tmp_path / "other", embed=(100,), target=v3, **options), 1)
    for length in (1, 20, 70, 91):
        tokens = np.random.default_rng(length).integers(3, 211, length).tolist()
        assert same(one.encode(tokens), other.encode(tokens)), f"{length} tokens"


def test_a_family_without_canonical_kernels_is_rejected(tmp_path):
    with pytest.raises(EmitError, match=r"has no kernel for a matmul of two activations: .*layers.0.self_attn"):
        compile_bundle(tiny_model("glm4_moe_lite", tmp_path / "checkpoint"), tmp_path / "bundle", context=40)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = checkpoint(Path(folder) / "checkpoint")
        paths = {way: compile_bundle(made, Path(folder) / way, **options) for way, (options, _) in WAYS.items()}
        hashes = {way: digest(decoded(Session(open_bundle(path), 1), PROMPT)) for way, path in paths.items()}
    HASHES.write_text(json.dumps(hashes, indent=2) + "\n")


if __name__ == "__main__":
    main()
