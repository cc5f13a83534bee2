"""A config.json of old or new transformers is read strictly, with HF's defaults and no others."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers.rotary import Rotary
from castiron.emitter.models import ENCODERS, FAMILIES, build, ignored_keys, read_config
from castiron.emitter.models.config import HF_KEYS, IGNORABLE, ConfigReader
from castiron.reference import config_keys
from castiron.reference.tiny import COMMON
from castiron.reference.tiny import FAMILIES as TINY

# As published before transformers 5, with the keys that those checkpoints carry besides.
PUBLISHED: dict[str, dict] = json.loads(Path(__file__).with_name("published_configs.json").read_text(encoding="utf-8"))


def read(config: dict) -> dict:
    """Return the fields that a family reads from a config, in a comparable form."""
    c = read_config(config)
    return {field.name: _comparable(getattr(c, field.name)) for field in fields(c)}


def _comparable(value):
    if isinstance(value, Rotary):
        return value.inv_freq.tolist(), value.positions, value.attention_factor
    return value


def as_saved_by_transformers(config: dict) -> dict:
    """Return the config as transformers 5 reads and writes it."""
    return AutoConfig.for_model(**config).to_dict()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_reads_as_transformers_understands_it(name):
    assert read(PUBLISHED[name]) == read(as_saved_by_transformers(PUBLISHED[name]))


def test_every_family_has_a_published_config():
    assert {config["model_type"] for config in PUBLISHED.values()} == {*FAMILIES, *ENCODERS}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
_WINDOWED = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
_GEMMA = {"hidden_activation": "gelu", "tie_word_embeddings": False}
UNLIKE = {
    # HF's 8 groups, of which 4 are used, must fit the experts too.
    "deepseek_v3": {"n_routed_experts": 32, "n_group": 4, "topk_group": 2},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gemma4_text": _GEMMA,
    "qwen2": _WINDOWED,
    "qwen3": _WINDOWED,
    "qwen3_moe": {"use_sliding_window": True, "sliding_window": 24, "mlp_only_layers": [1], "norm_topk_prob": True},
    "smollm3": {"use_sliding_window": True, "sliding_window": 24},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True},
    "phi3": {"sliding_window": 24},
    "nemotron_h": {"tie_word_embeddings": False},
}


def unlike_the_defaults(model_type: str) -> dict:
    """A config whose values are not HF's defaults, as transformers 5 writes it."""
    unlike = {"tie_word_embeddings": True, **UNLIKE.get(model_type, {})}
    config = {"hidden_act": "gelu", **COMMON, **TINY[model_type], **unlike}
    if "hidden_activation" in config:
        del config["hidden_act"]
    return as_saved_by_transformers({"model_type": model_type, **config})


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_key_that_is_absent_has_the_default_of_transformers(model_type):
    """Or the key is required; there are no other defaults."""
    complete = unlike_the_defaults(model_type)
    read(complete)
    required = []
    for key in complete:
        partial = {k: v for k, v in complete.items() if k != key}
        try:
            expected = as_saved_by_transformers(partial) if key != "model_type" else None
        except Exception:  # whatever transformers raises where it has no default either
            expected = None
        try:
            ours = read(partial)
        except EmitError:
            required.append(key)
            continue
        assert expected is not None and ours == read(expected), f"without {key}"
    # The list of Nemotron-H's layers has their number.
    sizes = {"model_type", "hidden_size", "vocab_size", "num_hidden_layers"} & {
        *complete,
        *CONFIG_MAPPING[model_type].attribute_map,
    }
    assert {CONFIG_MAPPING[model_type].attribute_map.get(size, size) for size in sizes} <= set(required)
    # Required keys are sizes, which every checkpoint has, and not flags.
    assert len(required) <= 9, required


@pytest.mark.parametrize("model_type", FAMILIES)
def test_rejects_an_unknown_key_that_hf_reads(model_type, monkeypatch):
    config = {**unlike_the_defaults(model_type), "sink_multiplier": 2.0}
    monkeypatch.setitem(HF_KEYS, model_type, [*HF_KEYS.get(model_type, ()), "sink_multiplier"])
    with pytest.raises(
        EmitError, match=f"unknown keys in the {model_type} config may change the results: 'sink_multiplier';"
    ) as error:
        read(config)
    assert "--ignore-key" in str(error.value) and len(str(error.value)) < 300


# As trainers and older transformers leave them.
LEFTOVERS = {
    "unsloth_version": "2025.1.8", "unsloth_fixed": True, "max_length": 8192, "_flash_attn_2_enabled": True,
    "neftune_noise_alpha": 5, "temperature": 0.7, "do_sample": True, "quantization": "none", "use_flash_attn": True,
    "attention_chunk_size": None, "quantization_config": None
}  # fmt: skip


@pytest.mark.parametrize("model_type", FAMILIES)
def test_reports_keys_that_hf_never_reads_as_ignored(model_type):
    config = unlike_the_defaults(model_type)
    assert read({**config, **LEFTOVERS}) == read(config)
    assert set(ignored_keys({**config, **LEFTOVERS})) - set(ignored_keys(config)) == set(LEFTOVERS)


@pytest.mark.parametrize("key", ["attention_chunk_size", "quantization_config", "is_causal"])
def test_rejects_unknown_keys_that_hf_reads_in_every_config(key):
    with pytest.raises(EmitError, match=f"unknown keys in the llama config may change the results: '{key}'"):
        read({**PUBLISHED["SmolLM2"], key: {"bits": 4} if key.endswith("config") else 8})


def test_many_unknown_keys_make_one_short_error(monkeypatch):
    keys = {f"sink_multiplier_{n}": n for n in range(40)}
    monkeypatch.setitem(HF_KEYS, "llama", [*HF_KEYS["llama"], *keys])
    with pytest.raises(EmitError, match="'sink_multiplier_0', .* and 37 more; ignore") as error:
        read({**PUBLISHED["SmolLM2"], **keys})
    assert len(str(error.value)) < 300


def test_ignores_only_trainers_keys_of_a_family_unknown_to_hf():
    for key, refused in (("unsloth_version", False), ("neftune_noise_alpha", False), ("use_flash_attn", True)):
        reader = ConfigReader({"model_type": "unheard", key: 1})
        if refused:
            with pytest.raises(EmitError, match=key):
                reader.finish()
        else:
            reader.finish()


def test_the_keys_that_hf_reads_are_those_of_the_installed_transformers():
    assert config_keys.PATH.read_text() == config_keys.source(), "run python -m castiron.reference.config_keys"


def test_an_unread_key_of_a_new_family_names_the_command_that_lists_keys(monkeypatch):
    config = {**unlike_the_defaults("llama"), "transformers_only": 1}
    assert "transformers_only" not in HF_KEYS["llama"] and read(config)
    monkeypatch.delitem(HF_KEYS, "llama")
    with pytest.raises(EmitError, match="does not list the keys of llama.*: 'transformers_only'; run python -m castiron.ref"):
        read(config)


def test_ignores_fields_of_hfs_base_config():
    assert {field.name for field in fields(PreTrainedConfig)} <= IGNORABLE


@pytest.mark.parametrize(
    ("model_type", "change", "words"),
    [
        ("llama", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("llama", {"hidden_size": "64"}, "'hidden_size' in the llama config is '64'; it must be an integer"),
        ("llama", {"num_hidden_layers": 0}, "'num_hidden_layers' in the llama config is 0; it must be at least 1"),
        ("llama", {"num_key_value_heads": True}, "is True; it must be an integer"),
        ("llama", {"hidden_act": "mish"}, "'hidden_act' in the llama config is 'mish'; supported are silu"),
        ("llama", {"partial_rotary_factor": 0.5}, "this family rotates complete heads"),
        ("llama", {"rope_scaling": {"type": "ntk"}}, "rope scaling 'ntk' is not supported"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "for each of 3 layers"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 3}, "must have 'full_attention' or 'sliding_attention'"),
        (
            "qwen3",
            {"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False},
            "the qwen3 config lacks 'sliding_window'",
        ),
        ("smollm3", {"no_rope_layers": [1, 2, 0]}, "'no_rope_layers' in the smollm3 config is .*; it must have 0 or 1"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "for each of 3 layers"),
        ("gemma2", {"use_bidirectional_attention": True}, "only False is supported"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "config is 50.0; only null is supported"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default"}},
            "has rope_type; it must have full_attention and sliding_attention only",
        ),
        ("phi3", {"lm_head_bias": True}, "'lm_head_bias' in the phi3 config is True; only False"),
        ("stablelm", {"head_dim": 20}, "unknown keys in the stablelm config may change the results: 'head_dim';"),
        ("starcoder2", {"norm_type": "rms_norm"}, "only 'layer_norm' is supported"),
        ("gemma", {"hidden_act": "silu"}, "only 'gelu' or 'gelu_pytorch_tanh' is supported"),
        ("olmo3", {"rope_parameters": YARN}, "it must have full_attention and sliding_attention only"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "the exaone4 config lacks 'layer_types'"),
        ("ministral3", {"rope_parameters": YARN}, "lacks the number 'llama_4_scaling_beta' in its 'rope_parameters'"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "names 'fp8'; only 'mxfp4' is supported"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "only 'vision' is supported"),
        (
            "gemma4_text",
            {"num_kv_shared_layers": 4},
            "is 4, which leaves all full-attention or all sliding-window layers without",
        ),
        ("gemma4_text", {"per_layer_config": {"1": {"head_dim": 24}}}, "has entries for layers 1; it must have"),
        ("gemma4_text", {"rope_parameters": {"full_attention": {}}}, "has full_attention; it must have full_attention and"),
        (
            "gemma4_text",
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "beta_fast": 1}, "sliding_attention": {}}},
            "'proportional' in the gemma4_text config has unknown keys: beta_fast; only factor, ",
        ),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "is 'noaux_tc'; supported are greedy, group_limited_greedy"),
        ("deepseek_v2", {"norm_topk_prob": True}, "config is True; only False is supported"),
        ("glm4_moe_lite", {"n_group": 4}, "config is 4; it must divide 6 experts into groups"),
        (
            "falcon_h1",
            {"time_step_limit": [2.0, 1.0]},
            "'time_step_limit' in the falcon_h1 config is .2.0, 1.0.; it must be .min, max. with 0 <= min <= max",
        ),
        ("lfm3", {"sliding_window": None}, "the lfm3 config lacks 'sliding_window' for its layers"),
        ("nemotron_h", {"tie_word_embeddings": True}, "config is True; only False is supported"),
        (
            "nemotron_h",
            {"hybrid_override_pattern": "MX"},
            "'hybrid_override_pattern' in the nemotron_h config has unknown letters: X; use M",
        ),
        ("glm4_moe_lite", {"num_key_value_heads": 2}, "must equal 'num_attention_heads'"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "must have 'dense' or 'sparse' for each of 3 layers"),
    ],
)
def test_rejects_a_value_that_is_not_understood(model_type, change, words):
    with pytest.raises(EmitError, match=words):
        read({**unlike_the_defaults(model_type), **change})


def test_longrope_limits_the_context_to_the_original_length_in_families_that_keep_the_cache():
    """HF computes the cache again in Phi-3 only."""
    config = PUBLISHED["Phi 3.5 mini"]
    assert (read_config(config).max_positions, read_config(config).original_context) == (131072, 4096)
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    llama = {
        **unlike_the_defaults("llama"),
        "head_dim": 16,
        "rope_scaling": {**factors, "original_max_position_embeddings": 64},
    }
    assert read_config(llama).max_positions == 64
    with pytest.raises(EmitError, match="1 to 64 positions, because rotary scaling for a longer context would change"):
        build(llama, lambda name: "f32", 128, ())


def test_functions_for_long_sequences_exist_only_past_the_original_length():
    config = PUBLISHED["Phi 3.5 mini"]
    names = lambda context: set(build(config, lambda name: "f32", context, (8,), (4,), (2,)).functions)
    short = {"decode_step", "prefill_8", "verify_4", "decode_batch_2"}
    assert names(4096) == short
    assert names(4097) == short | {"decode_step_long", "prefill_8_long", "verify_4_long"}


def test_phi3_has_an_original_length_of_its_own():
    """HF's default of the top level replaces the value in `rope_scaling`."""
    config = dict(PUBLISHED["Phi 3.5 mini"])
    del config["original_max_position_embeddings"]
    config["rope_scaling"] = {**config["rope_scaling"], "original_max_position_embeddings": 2048}
    assert read_config(config).original_context == 4096
