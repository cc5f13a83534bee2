"""The strict reader of a `config.json`: an unread key that may change the results is an error."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from castiron.emitter.graph.types import EmitError, is_number, is_positive
from castiron.emitter.layers.rotary import WITH_ORIGINAL_LENGTH, Rotary, check_entry, proportional, rotary
from castiron.emitter.shorten import shorten, shorten_list

# Keys of training, bookkeeping and generation defaults, which do not change the forward pass.
IGNORABLE = frozenset(
    """
    architectures model_type name_or_path _name_or_path auto_map tokenizer_class torch_dtype dtype use_bfloat16
    torchscript transformers_version use_cache cache_implementation return_dict chunk_size_feed_forward
    initializer_range attention_dropout hidden_dropout resid_pdrop residual_dropout embd_pdrop embedding_dropout
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id
    output_attentions output_hidden_states output_router_logits router_aux_loss_coef router_jitter_noise
    id2label label2id problem_type task_specific_params finetuning_task prefix pruned_heads tie_encoder_decoder
    is_decoder is_encoder_decoder add_cross_attention cross_attention_hidden_size keys_to_ignore_at_inference
    attn_implementation _attn_implementation _attn_implementation_autoset is_llama_config transformers.js_config
    sentence_transformers sbert_ce_default_activation_function
    """.split()
)
# Keys that trainers add to the config of any family.
TRAINERS = re.compile(
    "unsloth_.*|max_length|min_length|neftune_noise_alpha|_flash_attn_2_enabled|use_flash_attention(_2)?|use_liger_kernel"
    "|gradient_checkpointing|model_max_length|max_seq_length|tokenizer_model_max_length|tokenizer_padding_side|lora_.*"
)
# The config keys that HF reads, by model type; "shared" for all. reference/config_keys.py writes the file.
HF_KEYS: dict[str, list[str]] = json.loads(Path(__file__).with_name("hf_keys.json").read_text(encoding="utf-8"))

_MAX_KEYS_IN_ERROR = 3
# Sizes and positions are counted in i32.
_MAX_INT = (1 << 31) - 1
# Lists that their families check, because the last number may be infinite.
_CHECKED_BY_FAMILIES = frozenset({"time_step_limit"})
# Keys whose number must be above 0, because it is a divisor, or its root or logarithm is computed.
POSITIVE = frozenset(
    """
    rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon rope_theta rope_local_base_freq
    partial_rotary_factor query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping logits_scaling
    swiglu_limit block_ffn_dim_multiplier
    """.split()
)
_JSON_NAMES = {str: "a string", bool: "true or false", list: "a list", tuple: "a list", dict: "an object", float: "a number"}
_ROPE_ENTRIES = ("rope_scaling", "rope_parameters")
FULL, SLIDING = "full_attention", "sliding_attention"
# Names of `layer_types` before transformers 5.
_OLD_TYPES = {"mamba": "linear_attention", "attention": FULL}
# HF's names of activations, and those of `layers.operations.ACTIVATIONS`.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
C = TypeVar("C")


def _json_names(kinds: tuple[type, ...]) -> str:
    names = (_JSON_NAMES.get(kind, "an integer") for kind in kinds if kind is not int or float not in kinds)
    return " or ".join(dict.fromkeys(names))


class ConfigReader:
    """A reader of a config.json that records which keys a model family has read."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self.model_type = config.get("model_type", "?")
        self._taken: set[str] = set()

    def _error(self, key: str, value: Any, remedy: str) -> EmitError:
        return EmitError(f"{key!r} in the {self.model_type} config is {shorten(value)}; {remedy}")

    def take(self, key: str, default: Any = ..., kinds: type | tuple[type, ...] = (int,), minimum: int = 1) -> Any:
        """Return the value of `key`, or `default` if the key is absent or null.

        kinds: the allowed Python types. `...` as default: EmitError if there is no value.
        """
        self._taken.add(key)
        value = self.config.get(key)
        if value is None:
            if default is ...:
                raise EmitError(f"the {self.model_type} config lacks {key!r}")
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self._error(key, value, f"it must be {_json_names(kinds)}")
        if required := self._requirement(key, value, minimum if kinds == (int,) else None):
            raise self._error(key, value, f"it must be {required}")
        if key in _ROPE_ENTRIES and isinstance(value, dict):
            check_entry(value)
        return value

    @staticmethod
    def _requirement(key: str, value: Any, minimum: int | None) -> str | None:
        if minimum is not None and not minimum <= value <= _MAX_INT:
            return f"at least {minimum}" if value < minimum else f"at most {_MAX_INT}"
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value):
            return "in the range of f32"
        if key in POSITIVE and not is_positive(value):
            return "above 0"
        if isinstance(value, list) and key not in _CHECKED_BY_FAMILIES:
            are_strings = all(isinstance(item, str) for item in value)
            if not are_strings and not all(isinstance(item, bool) or is_number(item) for item in value):
                return "a list of strings or a list of numbers"
        return None

    def nullable(self, key: str, default: Any, kinds: type | tuple[type, ...] = (int,)) -> Any:
        """Return the value of `key`: None if it is null, and `default` if the key is absent."""
        self._taken.add(key)
        if key in self.config and self.config[key] is None:
            return None
        return self.take(key, default, kinds)

    def number(self, key: str, default: Any = ...) -> float:
        return float(self.take(key, default, (int, float)))

    def numbers(self, key: str, default: Sequence[float]) -> tuple[float, ...]:
        """Return the list of numbers at `key`, which must be as long as `default`."""
        values = self.take(key, list(default), list)
        if len(values) != len(default) or not all(map(is_number, values)):
            raise self._error(key, values, f"it must be a list of {len(default)} numbers")
        return tuple(values)

    def flag(self, key: str, default: bool) -> bool:
        return self.take(key, default, bool)

    def require(self, key: str, *values: Any) -> None:
        """Raise EmitError unless the value of `key` is absent, null or one of `values`."""
        self._taken.add(key)
        value = self.config.get(key)
        if value is not None and value not in values:
            allowed = " or ".join(repr(v) for v in values) or "null"
            raise self._error(key, value, f"only {allowed} is supported")

    def choice(self, key: str, choices: Mapping[str, str], default: Any = ...) -> str:
        """Return `choices[value]` for the value of `key`; EmitError if it is not a choice."""
        value = self.take(key, default, str)
        if value not in choices:
            raise self._error(key, value, f"supported are {', '.join(choices)}")
        return choices[value]

    def unused(self, *keys: str) -> None:
        """Mark `keys` as read, because neither castiron nor HF's model uses them."""
        self._taken.update(keys)

    def windows(self, layers: int, window: int | None, slides: Callable[[int], bool]) -> list[int | None]:
        """Return `window` for each layer with a sliding window, and None for the other layers."""
        types = self.layer_types(layers, (FULL, SLIDING), [SLIDING if slides(layer) else FULL for layer in range(layers)])
        if SLIDING in types and window is None:
            raise EmitError(f"the {self.model_type} config lacks 'sliding_window' for its layers")
        return [window if type_ == SLIDING else None for type_ in types]

    def layer_types(self, layers: int, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        """Return the type of each layer: `layer_types`, or `default` without this key."""
        types = [_OLD_TYPES.get(type_, type_) for type_ in self.take("layer_types", default, (list, tuple))]
        if len(types) != layers or any(type_ not in known for type_ in types):
            wanted = f"{' or '.join(map(repr, known))} for each of {layers} layers"
            raise self._error("layer_types", types, f"it must have {wanted}")
        return tuple(types)

    def expert_groups(self, experts: int, per_token: int, groups: int = 1, best: int = 1) -> tuple[int, int]:
        """Return `n_group` and `topk_group`: the expert groups, and those that a token may use."""
        groups, best = self.take("n_group", groups), self.take("topk_group", best)
        if groups > 1:
            if experts % groups or experts < 2 * groups:
                raise self._error("n_group", groups, f"it must divide {experts} experts into groups of 2 or more")
            if best > groups:
                raise self._error("topk_group", best, f"it must be at most 'n_group', {groups}")
            if (usable := best * experts // groups) < per_token:
                remedy = f"it allows a token {usable} experts, but a token uses {per_token}"
                raise self._error("topk_group", best, remedy)
        return groups, best

    def rotary(self, head_dim: int, max_positions: int, theta: float = 10000.0, partial: float | None = None) -> Rotary:
        """Return the frequencies of `rope_parameters` (since transformers 5) or `rope_scaling`.

        partial: HF's default of the share of a head that is rotated; None: always complete heads.
        """
        entry = self.take("rope_scaling", None, dict) or self.take("rope_parameters", None, dict) or {}
        self._taken |= {"rope_parameters", "rope_scaling"}
        share = self.take("partial_rotary_factor", partial or 1.0, (int, float))
        share = entry.get("partial_rotary_factor") or share
        if partial is None and share != 1:
            raise self._error("partial_rotary_factor", share, "it must be 1, because this family rotates complete heads")
        return self.frequencies(entry, int(head_dim * share), max_positions, self.number("rope_theta", theta))

    def rotaries(self, head_dims: Sequence[int], max_positions: int, full: Mapping, sliding: Mapping) -> tuple[Rotary, Rotary]:
        """Return the rotary frequencies of full attention and of sliding-window attention."""
        nested, defaults = self.take("rope_parameters", {}, dict), (full, sliding)
        if nested and set(nested) != {FULL, SLIDING}:
            kinds = shorten_list(sorted(nested))
            raise EmitError(
                f"'rope_parameters' in the {self.model_type} config has {kinds}; it must have {FULL} and {SLIDING} only"
            )
        entries = [nested.get(kind) or default for kind, default in zip((FULL, SLIDING), defaults)]
        if not all(isinstance(entry, Mapping) for entry in entries):
            raise self._error("rope_parameters", nested, f"{FULL} and {SLIDING} in it must be objects")
        entries[0] = {**entries[0], **self.take("rope_scaling", {}, dict)}
        of_full, of_sliding = (
            self.frequencies(entry, head_dim, max_positions, default["rope_theta"])
            for entry, head_dim, default in zip(entries, head_dims, defaults)
        )
        return of_full, of_sliding

    def frequencies(self, entry: Mapping, rotary_dim: int, max_positions: int, theta: float) -> Rotary:
        """Return the frequencies of the rope parameters `entry`; `theta` if it has no `rope_theta`.

        As in HF, a config's own `original_max_position_embeddings` overrides the one in `entry`.
        """
        original = self.take("original_max_position_embeddings", None)
        kind = entry.get("rope_type") or entry.get("type")
        if kind == "proportional":
            known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
            if unknown := set(entry) - known:
                raise EmitError(
                    f"rope scaling 'proportional' in the {self.model_type} config has unknown keys: "
                    f"{', '.join(sorted(unknown))}; only {', '.join(sorted(known))} are supported"
                )
            share, factor = entry.get("partial_rotary_factor", 1.0), entry.get("factor", 1.0)
            return proportional(entry.get("rope_theta") or theta, rotary_dim, share, factor, max_positions)
        if original is not None and kind in WITH_ORIGINAL_LENGTH:
            entry = {**entry, "original_max_position_embeddings": original}
        return rotary(entry.get("rope_theta") or theta, rotary_dim, entry, max_positions)

    def read(
        self, config: type[C], positions: Any = ..., theta: float = 10000.0, partial: float | None = None, **own: Any
    ) -> C:
        """Read config.json into a new instance of `config`, the dataclass of a model family.

        own: fields that the caller has computed. A field with a default is read from the key of its
            name, another one from HF's usual key, such as `vocab` from `vocab_size`.
        positions: HF's default of `max_position_embeddings`; `...` if the key is required.
        """
        hidden = own.get("hidden") or self.take("hidden_size")
        layers = own.get("layers") or self.take("num_hidden_layers")
        heads = own.get("heads") or self.take("num_attention_heads")
        head_dim = own.get("head_dim") or self.take("head_dim", hidden // heads)
        readers: dict[str, Callable[[], Any]] = {
            "vocab": lambda: self.take("vocab_size"),
            "hidden": lambda: hidden,
            "intermediate": lambda: self.take("intermediate_size"),
            "layers": lambda: layers,
            "heads": lambda: heads,
            "kv_heads": lambda: self.take("num_key_value_heads"),
            "head_dim": lambda: head_dim,
            "eps": lambda: self.number("rms_norm_eps", 1e-6),
            "hidden_act": lambda: self.choice("hidden_act", ACTIVATION_NAMES, "silu"),
            "tied": lambda: self.flag("tie_word_embeddings", False),
            "attention_bias": lambda: False,
            "mlp_bias": lambda: False,
            "rotary": lambda: self.rotary(head_dim, self.take("max_position_embeddings", positions), theta, partial),
            "windows": lambda: [None] * layers,
            "bidirectional": lambda: False,
        }
        kinds: dict[type, Callable[[str, Any], Any]] = {
            bool: self.flag, int: self.take, float: self.number, tuple: self.numbers,
        }  # fmt: skip
        for field in fields(config):  # type: ignore[arg-type]
            if field.name in own:
                continue
            if field.default is not MISSING:
                own[field.name] = kinds[type(field.default)](field.name, field.default)
            elif field.name in readers:
                own[field.name] = readers[field.name]()
        return config(**own)

    def finish(self) -> tuple[str, ...]:
        """Return the keys that neither this reader nor HF's model has read, but ignorable ones.

        Raise EmitError for a key that HF's model may read, because it could change the logits.
        """
        rest = sorted(set(self.config) - self._taken - IGNORABLE)
        if unknown := [shorten(key, 60) for key in rest if self._has_effect(key)]:
            more = f" and {len(unknown) - _MAX_KEYS_IN_ERROR} more" * (len(unknown) > _MAX_KEYS_IN_ERROR)
            keys = f"{', '.join(unknown[:_MAX_KEYS_IN_ERROR])}{more}"
            if self.model_type not in HF_KEYS:
                raise EmitError(
                    f"hf_keys.json does not list the keys of {self.model_type}, so these may change the results: {keys}; "
                    "run python -m castiron.reference.config_keys"
                )
            raise EmitError(
                f"unknown keys in the {self.model_type} config may change the results: {keys}; "
                "ignore each with --ignore-key KEY, then run castiron verify"
            )
        return tuple(rest)

    def _has_effect(self, key: str) -> bool:
        """Return whether HF's model may read `key`; True if its keys are unknown."""
        if TRAINERS.fullmatch(key):
            return False
        if self.model_type not in HF_KEYS:
            return True
        # HF looks for shared keys in every config, and treats null as absent.
        return key in HF_KEYS[self.model_type] or (key in HF_KEYS["shared"] and self.config[key] is not None)
