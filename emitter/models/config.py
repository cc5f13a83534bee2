"""Reading a `config.json` strictly: every key is used, known to change nothing, or an error."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from castiron.emitter.models.hf_keys import DEFINED, SHARED
from castiron.emitter.rotary import WITH_ORIGINAL_LENGTH, Rotary, check_entry, proportional, rotary
from castiron.emitter.shown import shown
from castiron.emitter.types import EmitError, is_number, is_positive

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
    sentence_transformers sbert_ce_default_activation_function
    """.split()
)

# What trainers leave behind, in the config of a family that HF knows or not.
TRAINERS = re.compile(
    "unsloth_.*|max_length|min_length|neftune_noise_alpha|_flash_attn_2_enabled|use_flash_attention(_2)?|use_liger_kernel"
    "|gradient_checkpointing|model_max_length|max_seq_length|tokenizer_model_max_length|tokenizer_padding_side|lora_.*"
)

# Of the keys that are refused, how many an error names.
_SHOWN = 3


# Sizes and positions are counted in i32.
_MOST = (1 << 31) - 1
# Lists of which the last number may be infinite.
_CHECKED_BY_FAMILIES = frozenset({"time_step_limit"})
# Numbers that are divided by, or whose root or logarithm is taken.
POSITIVE = frozenset(
    """
    rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon rope_theta rope_local_base_freq
    partial_rotary_factor query_pre_attn_scalar attn_logit_softcapping final_logit_softcapping logits_scaling
    swiglu_limit block_ffn_dim_multiplier
    """.split()
)
_ROPE_ENTRIES = ("rope_scaling", "rope_parameters")


class Noted(dict):
    """A config that remembers what reading it found: `ignored`, the keys that change nothing, in alphabetical order.

    Bookkeeping that every checkpoint has (`HARMLESS`) is not among them.
    """

    ignored: tuple[str, ...] = ()


class ConfigReader:
    """Takes keys out of a config; `finish` refuses what nobody took."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = dict(config)
        self._source = config
        self.model_type = config.get("model_type", "?")
        self._taken: set[str] = set()

    def take(self, key: str, default: Any = ..., kinds: type | tuple[type, ...] = (int,), least: int = 1) -> Any:
        """The value of `key`; without a default it must be there. A null counts as absent.

        `kinds` are the types it may have. A whole number must be at least `least`, any number one that f32 holds (above zero
        for `POSITIVE`), a list one of words or of numbers, and a rope entry pass `check_entry`.
        """
        self._taken.add(key)
        value = self.config.get(key)
        if value is None:
            if default is ...:
                raise EmitError(f"the {self.model_type} config lacks {key!r}")
            return default
        kinds = kinds if isinstance(kinds, tuple) else (kinds,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise EmitError(f"{key!r} in the {self.model_type} config is {shown(value)}, not {names}")
        if problem := self._impossible(key, value, least if kinds == (int,) else None):
            raise EmitError(f"{key!r} in the {self.model_type} config is {shown(value)}, {problem}")
        if key in _ROPE_ENTRIES and isinstance(value, dict):
            check_entry(value)
        return value

    @staticmethod
    def _impossible(key: str, value: Any, least: int | None) -> str | None:
        """Why no model has this value, if so. least: of a whole number."""
        if least is not None and not least <= value <= _MOST:
            return f"which is less than {least}" if value < least else f"which is more than {_MOST}"
        if isinstance(value, int | float) and not isinstance(value, bool) and not is_number(value):
            return "which is not a number of f32"
        if key in POSITIVE and not is_positive(value):
            return "which is not above 0"
        if (
            isinstance(value, list)
            and key not in _CHECKED_BY_FAMILIES
            and not (all(isinstance(one, str) for one in value) or all(map(_is_plain, value)))
        ):
            return "which is neither a list of words nor one of numbers"
        return None

    def nullable(self, key: str, default: Any, kinds: type | tuple[type, ...] = (int,)) -> Any:
        """The value of `key` where a null means that there is none; HF's `default` where the key is absent."""
        self._taken.add(key)
        if key in self.config and self.config[key] is None:
            return None
        return self.take(key, default, kinds)

    def number(self, key: str, default: Any = ...) -> float:
        """A float-valued key."""
        return float(self.take(key, default, (int, float)))

    def numbers(self, key: str, default: Sequence[float]) -> list[float]:
        """A list of as many numbers as `default` has."""
        values = self.take(key, list(default), list)
        if len(values) != len(default) or not all(map(is_number, values)):
            raise EmitError(f"{key!r} in the {self.model_type} config is {shown(values)}, not {len(default)} numbers")
        return values

    def flag(self, key: str, default: bool) -> bool:
        """A boolean key."""
        return self.take(key, default, bool)

    def require(self, key: str, *values: Any) -> None:
        """If present and not null, `key` must be one of `values`: others are other mathematics."""
        self._taken.add(key)
        value = self.config.get(key)
        if value is not None and value not in values:
            allowed = " or ".join(repr(v) for v in values) or "null"
            raise EmitError(f"{key!r} in the {self.model_type} config is {shown(value)}; only {allowed} is supported")

    def choice(self, key: str, choices: Mapping[str, str], default: Any = ...) -> str:
        """A key whose value is looked up in a table."""
        value = self.take(key, default, str)
        if value not in choices:
            raise EmitError(f"{key!r} in the {self.model_type} config is {shown(value)}; supported are {', '.join(choices)}")
        return choices[value]

    def unused(self, *keys: str) -> None:
        """Keys that checkpoints of this family carry, but that HF's model does not read."""
        self._taken.update(keys)

    def windows(self, layers: int, window: int | None, default: Callable[[int], bool]) -> list[int | None]:
        """For each layer `window` where it slides, None where it sees everything: `layer_types`, else `default(layer)`."""
        types = self.layer_types(layers, (_FULL, _SLIDING), [_SLIDING if default(layer) else _FULL for layer in range(layers)])
        if _SLIDING in types and window is None:
            raise EmitError(f"the {self.model_type} config has layers with a sliding window, but no 'sliding_window'")
        return [window if type_ == _SLIDING else None for type_ in types]

    def layer_types(self, layers: int, known: Sequence[str], default: Sequence[str]) -> tuple[str, ...]:
        """What `layer_types` says each layer is, one of `known`; `default` where it is absent."""
        types = [_OLD_TYPES.get(type_, type_) for type_ in self.take("layer_types", default, (list, tuple))]
        if len(types) != layers or any(type_ not in known for type_ in types):
            raise EmitError(
                f"'layer_types' in the {self.model_type} config must say {' or '.join(map(repr, known))} for each of its "
                f"{layers} layers"
            )
        return tuple(types)

    def groups_of_experts(self, experts: int, per_token: int) -> tuple[int, int]:
        """How many groups of experts there are, and of how many of them a token's are chosen: `layers.route` takes both."""
        groups, kept = self.take("n_group", 1), self.take("topk_group", 1)
        if groups > 1 and (experts % groups or experts < 2 * groups or kept > groups or kept * experts // groups < per_token):
            raise EmitError(
                f"the {self.model_type} config cannot choose {per_token} of {experts} experts from {kept} of {groups} groups"
            )
        return groups, kept

    def rotary(self, head_dim: int, max_positions: int, theta: float = 10000.0, partial: float | None = None) -> Rotary:
        """Frequencies from `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before).

        theta: HF's default. partial: the share of a head that turns by default, None in a family where all of it must.
        """
        entry = self.take("rope_scaling", None, dict) or self.take("rope_parameters", None, dict) or {}
        self._taken |= {"rope_parameters", "rope_scaling"}
        share = self.take("partial_rotary_factor", partial or 1.0, (int, float))
        share = entry.get("partial_rotary_factor") or share
        if partial is None and share != 1:
            raise EmitError(
                f"'partial_rotary_factor' in the {self.model_type} config is {shown(share)}; this family rotates whole heads"
            )
        return self.frequencies(entry, int(head_dim * share), max_positions, self.number("rope_theta", theta))

    def rotaries(self, head_dim: int, max_positions: int, full: float, sliding: float) -> tuple[Rotary, Rotary]:
        """Frequencies of full and of sliding layers: nested in `rope_parameters`, or keys of their own before transformers 5.

        A rope scaling without a layer type is that of the full layers. full, sliding: theta where an entry names none.
        """
        nested = self.take("rope_parameters", {}, dict)
        entries = [nested.get(kind) or {} for kind in (_FULL, _SLIDING)]
        if not all(isinstance(entry, dict) for entry in entries):
            raise EmitError(f"'rope_parameters' in the {self.model_type} config must hold an object for each kind of layer")
        entries[0] = {**entries[0], **self.take("rope_scaling", {}, dict)}
        if set(nested) - {_FULL, _SLIDING}:
            raise EmitError(f"'rope_parameters' in the {self.model_type} config must hold {_FULL!r} and {_SLIDING!r} alone")
        of_full, of_sliding = (
            self.frequencies(entry, head_dim, max_positions, theta) for entry, theta in zip(entries, (full, sliding))
        )
        return of_full, of_sliding

    def frequencies(self, entry: Mapping, rotary_dim: int, max_positions: int, theta: float) -> Rotary:
        """Frequencies from one rope entry; `theta` if it names none. The config's own original length wins, as in HF.

        Of the kind 'proportional' a share of those of a whole head, of `rotary_dim`, is not zero.
        """
        original = self.take("original_max_position_embeddings", None)
        kind = entry.get("rope_type") or entry.get("type")
        if kind == "proportional":
            if unknown := set(entry) - {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}:
                raise EmitError(f"rope scaling 'proportional' has the unknown key {', '.join(sorted(unknown))}")
            share, factor = entry.get("partial_rotary_factor", 1.0), entry.get("factor", 1.0)
            return proportional(entry.get("rope_theta") or theta, rotary_dim, share, factor, max_positions)
        if original is not None and kind in WITH_ORIGINAL_LENGTH:
            entry = {**entry, "original_max_position_embeddings": original}
        return rotary(entry.get("rope_theta") or theta, rotary_dim, entry, max_positions)

    def decoder(
        self,
        max_positions: Any = ...,
        theta: float = 10000.0,
        partial: float | None = None,
        *,
        intermediate: int | None = None,
        head_dim: int | None = None,
        kv_heads: int | None = None,
        eps: float | None = None,
        hidden_act: str | None = None,
        tied: bool | None = None,
        rotary: Rotary | None = None,
        layers: int | None = None,
    ) -> dict[str, Any]:
        """The fields of a `DecoderConfig`, as keyword arguments.

        max_positions, theta, partial: HF's defaults for `rotary`; without the first, the key must be there. The others are
        fields that a family has read itself, because its key or HF's default for it is not the one below.
        """
        hidden, heads = self.take("hidden_size"), self.take("num_attention_heads")
        if head_dim is None:
            head_dim = self.take("head_dim", hidden // heads)
        if rotary is None:
            rotary = self.rotary(head_dim, self.take("max_position_embeddings", max_positions), theta, partial)
        return {
            "vocab": self.take("vocab_size"),
            "hidden": hidden,
            "intermediate": self.take("intermediate_size") if intermediate is None else intermediate,
            "layers": layers or self.take("num_hidden_layers"),
            "heads": heads,
            "kv_heads": self.take("num_key_value_heads") if kv_heads is None else kv_heads,
            "head_dim": head_dim,
            "eps": self.number("rms_norm_eps", 1e-6) if eps is None else eps,
            "hidden_act": self.choice("hidden_act", ACTIVATION_NAMES, "silu") if hidden_act is None else hidden_act,
            "tied": self.flag("tie_word_embeddings", False) if tied is None else tied,
            "rotary": rotary,
        }

    def finish(self) -> None:
        """Raise for every key that nobody took and that HF's model may read; note the others."""
        rest = sorted(set(self.config) - self._taken - HARMLESS)
        unknown = [key for key in rest if self._matters(key)]
        if unknown:
            named = ", ".join(shown(key, 60) for key in unknown[:_SHOWN]) + f" and {len(unknown) - _SHOWN} more" * (
                len(unknown) > _SHOWN
            )
            raise EmitError(
                f"the {self.model_type} config has {named}, which castiron does not understand and which may change the "
                "mathematics; --ignore-key KEY leaves one out, and castiron verify tells whether that was right"
            )
        if isinstance(self._source, Noted):
            self._source.ignored = tuple(rest)

    def _matters(self, key: str) -> bool:
        """Whether HF's model may read a key: of a family that HF does not know, any but a trainer's."""
        if TRAINERS.fullmatch(key):
            return False
        if self.model_type not in DEFINED:
            return True
        # What is shared is looked for in every config, and a null is not there.
        return key in DEFINED[self.model_type] or (key in SHARED and self.config[key] is not None)


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool) or is_number(value)


_FULL, _SLIDING = "full_attention", "sliding_attention"
# What `layer_types` were called before transformers 5.
_OLD_TYPES = {"mamba": "linear_attention", "attention": _FULL}

# HF's names of activations: `castiron.emitter.layers.ACTIVATIONS`.
ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
