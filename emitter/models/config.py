"""Reading a `config.json` strictly: every key is used, known to be harmless, or an error."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emitter.rotary import Rotary, rotary
from emitter.types import EmitError

# Keys that change training, bookkeeping or generation defaults, but not the mathematics of a forward pass.
HARMLESS = frozenset(
    """
    architectures model_type name_or_path _name_or_path auto_map tokenizer_class torch_dtype dtype use_bfloat16
    torchscript transformers_version use_cache cache_implementation return_dict chunk_size_feed_forward
    initializer_range attention_dropout hidden_dropout resid_pdrop residual_dropout embd_pdrop embedding_dropout
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef router_jitter_noise
    id2label label2id problem_type task_specific_params finetuning_task prefix pruned_heads tie_encoder_decoder
    is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size keys_to_ignore_at_inference
    attn_implementation _attn_implementation _attn_implementation_autoset is_llama_config transformers.js_config
    """.split()
)


class ConfigReader:
    """Takes keys out of a config; `finish` refuses what nobody took."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.model_type = config.get("model_type", "?")
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = ..., kinds: type | tuple[type, ...] = (int,)) -> Any:
        """The value of `key`; without a default it must be there. A null counts as absent."""
        self._taken.add(key)
        value = self.config.get(key)
        if value is None:
            if default is ...:
                raise EmitError(f"the {self.model_type} config lacks {key!r}")
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise EmitError(f"{key!r} in the {self.model_type} config is {value!r}, not {names}")
        if kinds == (int,) and value < 1:
            raise EmitError(f"{key!r} in the {self.model_type} config is {value}, not a positive number")
        return value

    def number(self, key: str, default: Any = ...) -> float:
        """A float-valued key."""
        return float(self.take(key, default, (int, float)))

    def flag(self, key: str, default: bool) -> bool:
        """A boolean key."""
        return self.take(key, default, bool)

    def require(self, key: str, *values: Any) -> None:
        """If present, `key` must be one of `values`: others are other mathematics."""
        self._taken.add(key)
        value = self.config.get(key)
        if value is not None and value not in values:
            allowed = " or ".join(repr(v) for v in values)
            raise EmitError(f"{key!r} in the {self.model_type} config is {value!r}; only {allowed} is supported")

    def choice(self, key: str, choices: Mapping[str, str], default: Any = ...) -> str:
        """A key whose value is looked up in a table."""
        value = self.take(key, default, str)
        if value not in choices:
            raise EmitError(
                f"{key!r} in the {self.model_type} config is {value!r}; supported are {', '.join(choices)}"
            )
        return choices[value]

    def rotary(self, rotary_dim: int, max_positions: int, theta: float = 10000.0) -> Rotary:
        """Frequencies from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
        scaling = self.take("rope_parameters", None, dict) or self.take("rope_scaling", None, dict) or {}
        self._taken |= {"rope_parameters", "rope_scaling", "rope_theta"}
        theta = scaling.get("rope_theta") or self.config.get("rope_theta") or theta
        return rotary(theta, rotary_dim, scaling, max_positions)

    def finish(self) -> None:
        """Raise for every key that was neither taken nor harmless."""
        unknown = sorted(set(self.config) - self._taken - HARMLESS)
        if unknown:
            raise EmitError(
                f"the {self.model_type} config has {', '.join(map(repr, unknown))}, which castiron does not understand; "
                "a key that changes the mathematics cannot be ignored"
            )


# HF's names of activations: `emitter.layers.ACTIVATIONS`.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
