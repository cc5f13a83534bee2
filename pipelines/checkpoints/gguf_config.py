"""A GGUF file's metadata as the config.json that its model came from.

Every key under the architecture's prefix is read or refused: a key that is not understood may change the
mathematics.
"""

import math
import numbers
from collections.abc import Callable

import numpy as np

from castiron.emitter.pooling import Dense, Pooling
from castiron.emitter.shown import shown_list, shown_text
from castiron.pipelines.checkpoints.audit import refuse_impossible_sizes
from castiron.pipelines.checkpoints.checkpoint import CheckpointError, Encoding
from castiron.pipelines.checkpoints.gguf_architectures import architecture_names, architecture_row
from castiron.pipelines.checkpoints.gguf_file import GgufFile
from castiron.pipelines.checkpoints.gguf_gemma4 import gemma4_layers
from castiron.pipelines.checkpoints.gguf_rope import ROPE_RULES, head_dim
from castiron.pipelines.checkpoints.gguf_words import Architecture

# What llama.cpp takes where a file is silent.
_ROPE_BASE = _GEMMA3_LOCAL_ROPE_BASE = 10000.0
_GEMMA3_PATTERN = 6
_SMOLLM3_PATTERN = 4
_WINDOW_PATTERN = 4
# What HF's configs call the number of experts of a token.
_CHOSEN = {"num_experts_per_tok", "top_k_experts"}

# Keys that say nothing about the mathematics, repeat what the tensors' shapes say, or are read by `encoding_of`.
_SILENT_KEYS = {"vocab_size", "tensor_data_layout", "pooling_type"}
_SILENT_KEYS |= {f"dense_{n}_feat_{end}" for n in (2, 3) for end in ("in", "out")}

_TOKEN_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}


class Metadata:
    """The keys under one prefix, by default the architecture's own, without it; and which of them were asked for."""

    def __init__(self, file: GgufFile, prefix: str | None = None):
        self.file = file
        self.prefix = prefix or architecture_name(file) + "."
        self._asked: set[str] = set()

    def fail(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {what}")

    def get(self, key: str, default=None):
        self._asked.add(key)
        return self.file.metadata.get(self.prefix + key, default)

    def _typed(self, key: str, kind: type, words: str, default):
        value = self.get(key, default)
        if isinstance(value, np.ndarray) and len(value) and (value == value[0]).all():
            value = value[0].item()  # a number per layer, all the same
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
            raise self.fail(f"{self.prefix}{key} is {_short(value)}, not {words}")
        return value

    def integer(self, key: str, default: int | None = None) -> int | None:
        value = self._typed(key, numbers.Integral, "a whole number", default)
        if value is not None and value < 0:
            raise self.fail(f"{self.prefix}{key} is {value}, which is negative")
        return value

    def real(self, key: str, default: float | None = None) -> float | None:
        value = self._typed(key, numbers.Real, "a number", default)
        if value is not None and not math.isfinite(value):
            raise self.fail(f"{self.prefix}{key} is {value}, which is not finite")
        return None if value is None else float(value)

    def word(self, key: str, default: str | None = None) -> str | None:
        value = self.get(key, default)
        if value is not None and not isinstance(value, str):
            raise self.fail(f"{self.prefix}{key} is {_short(value)}, not a word")
        return value

    def required(self, key: str) -> int:
        value = self.integer(key)
        if not value:
            raise self.fail(f"the metadata key {self.prefix}{key} is missing or 0, so the model's shape is unknown")
        return value

    def by_layer(self, key: str) -> list[int]:
        """A number for each block, or the one number of all."""
        blocks, stated = self.required("block_count"), self.get(key)
        found = [stated] * blocks if isinstance(stated, int) else np.asarray(stated).tolist()
        if not isinstance(found, list) or len(found) != blocks or not all(isinstance(n, int) and n >= 0 for n in found):
            raise self.fail(f"{self.prefix}{key} is {_short(stated)}, not a number for each of {blocks} blocks")
        return found

    def unread(self) -> list[str]:
        mine = (key for key in self.file.metadata if key.startswith(self.prefix))
        return sorted(key for key in mine if key.removeprefix(self.prefix) not in self._asked | _SILENT_KEYS)


def _short(value) -> str:
    text = repr(value.tolist() if isinstance(value, np.ndarray) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def architecture_name(file: GgufFile) -> str:
    """`general.architecture` of the file."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path} does not say what it holds: general.architecture is missing")
    return name


def architecture_of(file: GgufFile) -> Architecture:
    """The row of the file's architecture; CheckpointError names those there are."""
    name = architecture_name(file)
    experts = file.metadata.get(f"{name}.expert_count", 0)
    windowed = f"{name}.attention.sliding_window" in file.metadata
    row = architecture_row(name, experts if isinstance(experts, int) else 1, windowed)
    if row is None:
        known = shown_list(architecture_names(), most=150)
        raise CheckpointError(f"{file.path} holds a {shown_text(name, 60)} model; supported are {known}")
    return row


# llama.cpp's numbers of how a text's states become its vector; 4 is a reranker's.
_POOLING = {1: "mean", 2: "cls", 3: "last"}


def encoding_of(file: GgufFile) -> Encoding | None:
    """How the file's model encodes texts, None for one that generates; its vectors are of length 1, as llama.cpp's are."""
    metadata = Metadata(file)
    kind = metadata.integer("pooling_type", 0)
    if not kind:
        return None
    if kind not in _POOLING:
        known = ", ".join(f"{n} ({how})" for n, how in _POOLING.items())
        raise metadata.fail(f"{metadata.prefix}pooling_type is {kind}, and castiron knows {known}")
    shapes = {n: file.tensors[name].shape for n in (2, 3) if (name := f"dense_{n}.weight") in file.tensors}
    dense = tuple(Dense(f"{n}_Dense", shape[0]) for n, shape in shapes.items())
    return Encoding(Pooling(_POOLING[kind], dense))


def hf_config(file: GgufFile) -> dict:
    """The config of the file's model in config.json's form, HF's key names; CheckpointError if one is unclear."""
    row, metadata = architecture_of(file), Metadata(file)
    config: dict = {"model_type": row.model_type, **row.constants}
    for names, read in ((row.ints, metadata.integer), (row.floats, metadata.real)):
        stated = {name: read(key) for key, name in names.items() if key not in row.by_layer}
        config |= {name: value for name, value in stated.items() if value is not None}
    _fill_sizes(config, metadata, row.by_layer)
    refuse_impossible_sizes(file.path, config, {name: tensor.shape for name, tensor in file.tensors.items()})
    if head_dim(config) == 0:
        raise metadata.fail(f"{config['hidden_size']} elements are too few for {config['num_attention_heads']} attention heads")
    config.setdefault("rope_theta", _ROPE_BASE)
    for name, leaf in row.flags.items():
        config[name] = f"blk.0.{leaf}" in file.tensors
    for rule in row.rules:
        RULES[rule](config, metadata)
    for key, name in _TOKEN_IDS.items():
        config[name] = _token_id(file, key)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["vocab_size"] = _vocab_size(file)
    if unread := metadata.unread():
        raise metadata.fail(f"unknown metadata could change the result: {shown_list(unread)}; --ignore-key KEY leaves one out")
    return config


def _fill_sizes(config: dict, metadata: Metadata, by_layer: tuple[str, ...]) -> None:
    for key in ("block_count", "embedding_length", "feed_forward_length", "attention.head_count", "context_length"):
        if key not in by_layer:
            metadata.required(key)
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    if metadata.integer("expert_count") == 0:  # how a dense file may say that it has none
        metadata.get("expert_used_count")
        for name in _CHOSEN:
            config.pop(name, None)
    elif metadata.integer("expert_count") and not config.keys() & _CHOSEN:
        raise metadata.fail(
            f"{metadata.prefix}expert_count is set, but {config['model_type']} models with experts are not supported"
        )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if kv_heads == 0 or heads % kv_heads:
        raise metadata.fail(f"{heads} attention heads cannot be divided among {kv_heads} key-value heads")
    for key in {"attention.key_length", "attention.value_length"}.difference(by_layer):
        length = metadata.integer(key)
        if length not in (None, head_dim(config)):
            raise metadata.fail(f"{metadata.prefix}{key} is {length}, but a head has {head_dim(config)} elements")


def _token_id(file: GgufFile, key: str) -> int | None:
    value = file.metadata.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise CheckpointError(f"{file.path}: {key} is {_short(value)}, not a token id")
    return value


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path} has no two-dimensional token_embd.weight: it is not a whole model")
    return embedding.shape[0]


def _llama_head_dim(config: dict, metadata: Metadata) -> None:
    config["head_dim"] = head_dim(config)


def _gemma_scale(config: dict, metadata: Metadata) -> None:
    """Attention is scaled by query_pre_attn_scalar ** -0.5; no file states it.

    It is hidden size over heads in the two 27B models, which llama.cpp knows by their number of layers, and
    head_dim in all others (llama.cpp, src/models/gemma2.cpp and gemma3.cpp).
    """
    large = {"gemma2": 46, "gemma3_text": 62}[config["model_type"]]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = per_head if config["num_hidden_layers"] == large else head_dim(config)


def _windowed_layers(layers: int, pattern: int) -> list[str]:
    """Every layer slides but each `pattern`-th."""
    return ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(layers)]


def _gemma2_layers(config: dict, metadata: Metadata) -> None:
    config["layer_types"] = _windowed_layers(config["num_hidden_layers"], 2)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.setdefault(key, None)


def _stated_layers(config: dict, metadata: Metadata, default: int) -> None:
    """Which layers slide: as the file says, by layer or every how many one does not, or `default` of these."""
    layers, pattern = config["num_hidden_layers"], metadata.get("attention.sliding_window_pattern", default)
    if not config.get("sliding_window"):
        config["layer_types"] = ["full_attention"] * layers
    elif isinstance(pattern, np.ndarray) and pattern.dtype == bool and len(pattern) == layers:
        config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        config["layer_types"] = _windowed_layers(layers, pattern)
    else:
        raise metadata.fail(f"{metadata.prefix}attention.sliding_window_pattern is {_short(pattern)}, not a whole number")


def _gemma3_layers(config: dict, metadata: Metadata) -> None:
    _stated_layers(config, metadata, _GEMMA3_PATTERN)
    config.setdefault("rope_local_base_freq", _GEMMA3_LOCAL_ROPE_BASE)
    config.setdefault("final_logit_softcapping", None)


def _every_fourth_full(config: dict, metadata: Metadata) -> None:
    """A model without a window has none to slide in."""
    _stated_layers(config, metadata, _WINDOW_PATTERN)
    config["sliding_window"] = config.get("sliding_window") or None


def _gpt_oss_layers(config: dict, metadata: Metadata) -> None:
    config["layer_types"] = _windowed_layers(config["num_hidden_layers"], 2)
    scaling = config.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        # HF rounds the borders of the ramp in all models but this, and no file says so.
        scaling["truncate"] = False


def _smollm3_layers(config: dict, metadata: Metadata) -> None:
    """HF lists 1 for a layer with rotary embedding; llama.cpp leaves it out of every fourth layer."""
    config["no_rope_layer_interval"] = _SMOLLM3_PATTERN
    layers = range(1, config["num_hidden_layers"] + 1)
    config["no_rope_layers"] = [int(layer % _SMOLLM3_PATTERN != 0) for layer in layers]


def _lfm2_layers(config: dict, metadata: Metadata) -> None:
    """A layer without key-value heads convolves."""
    layers, stated = config["num_hidden_layers"], metadata.get("attention.head_count_kv")
    heads = [stated] * layers if isinstance(stated, int) else np.asarray(stated).tolist()
    own = {count for count in heads if count} if isinstance(heads, list) and len(heads) == layers else set()
    if len(own) != 1 or not all(isinstance(count, int) and config["num_attention_heads"] % count == 0 for count in own):
        raise metadata.fail(
            f"{metadata.prefix}attention.head_count_kv is {_short(stated)}, not a number of heads for each layer"
        )
    config["num_key_value_heads"] = own.pop()
    config["layer_types"] = ["full_attention" if count else "conv" for count in heads]


def _hybrid_heads(config: dict, metadata: Metadata) -> list[int]:
    """Key-value heads by layer, 0 where a layer does not attend; those of the others are the config's."""
    heads = metadata.by_layer("attention.head_count_kv")
    config["num_key_value_heads"] = max(heads) or config["num_attention_heads"]
    # whether a rotary embedding was trained at other lengths, which these have none of
    metadata.get("rope.scaling.finetuned")
    metadata.get("rope.dimension_count")
    return heads


def _mamba_heads(config: dict, metadata: Metadata) -> None:
    features, heads = metadata.required("ssm.inner_size"), config["mamba_n_heads"]
    if features % heads:
        raise metadata.fail(f"{metadata.prefix}ssm.inner_size is {features}, which {heads} heads cannot share")
    config["mamba_d_head"] = features // heads
    if config["model_type"] == "granitemoehybrid":
        config["mamba_expand"] = features // config["hidden_size"]


def _granite_layers(config: dict, metadata: Metadata) -> None:
    kinds = ["full_attention" if heads else "linear_attention" for heads in _hybrid_heads(config, metadata)]
    config["layer_types"] = kinds
    first = kinds.index("linear_attention") if "linear_attention" in kinds else 0
    config["mamba_conv_bias"] = f"blk.{first}.ssm_conv1d.bias" in metadata.file.tensors
    config.setdefault("num_local_experts", 0)
    config.setdefault("shared_intermediate_size", config["intermediate_size"])


def _nemotron_layers(config: dict, metadata: Metadata) -> None:
    """A layer attends, or has an MLP or experts, or is a Mamba."""
    heads, widths = _hybrid_heads(config, metadata), metadata.by_layer("feed_forward_length")
    has = lambda layer, leaf: f"blk.{layer}.{leaf}" in metadata.file.tensors
    fed = ["moe" if has(layer, "ffn_gate_inp.weight") else "mlp" for layer in range(len(heads))]
    kinds = ["full_attention" if h else fed[i] if w else "linear_attention" for i, (h, w) in enumerate(zip(heads, widths))]
    dense = [width for width, kind in zip(widths, kinds) if kind == "mlp"]
    config["layers_block_type"] = kinds
    if dense:
        config["intermediate_size"] = dense[0]
    if config.get("moe_latent_size") == 0:
        del config["moe_latent_size"]
    config["mamba_head_dim"] = metadata.required("ssm.inner_size") // config["mamba_num_heads"]
    config["use_conv_bias"] = any(has(layer, "ssm_conv1d.bias") for layer in range(len(heads)))
    config["norm_topk_prob"] = metadata.get("expert_weights_norm", True) is True
    metadata.get("expert_shared_count")
    # what rotary embeddings would have
    del config["rope_theta"]
    metadata.get("rope.freq_base")


def _delta_layers(config: dict, metadata: Metadata) -> None:
    """Blocks after the last layer predict further tokens; positions of images are those of texts here."""
    config["num_hidden_layers"] -= metadata.integer("nextn_predict_layers", 0) or 0
    features, heads = metadata.required("ssm.inner_size"), config["linear_num_value_heads"]
    config["linear_value_head_dim"] = features // heads
    metadata.get("rope.dimension_sections")
    interval = config.get("full_attention_interval") or 4
    layers = range(config["num_hidden_layers"])
    config["layer_types"] = ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in layers]


def _olmo3_ropes(config: dict, metadata: Metadata) -> None:
    """What is scaled is scaled in full layers alone."""
    theta = {"rope_theta": config.pop("rope_theta")}
    scaling = config.pop("rope_scaling", {"rope_type": "default"})
    config["rope_parameters"] = {"full_attention": scaling | theta, "sliding_attention": {"rope_type": "default"} | theta}


def _mistral3_ropes(config: dict, metadata: Metadata) -> None:
    """Ministral 3's queries grow with their position; without that it is a Mistral."""
    beta, share = metadata.real("attention.temperature_scale"), metadata.real("rope.scaling.yarn_log_multiplier")
    if beta is None:
        config["model_type"] = "mistral"
        return
    # both sides of a score have the one share
    shares = {} if share is None else {"mscale": share, "mscale_all_dim": share}
    scaling = config.pop("rope_scaling", {"rope_type": "default"}) | shares
    config["rope_parameters"] = scaling | {"rope_theta": config.pop("rope_theta"), "llama_4_scaling_beta": beta}


_SIGMOID = 2


def _sigmoid_experts(config: dict, metadata: Metadata) -> None:
    if metadata.integer("expert_gating_func", _SIGMOID) != _SIGMOID:
        raise metadata.fail(
            f"{metadata.prefix}expert_gating_func is not {_SIGMOID}, and other scores of experts are not supported"
        )


def _normalised_experts(config: dict, metadata: Metadata) -> None:
    if metadata.get("expert_weights_norm", True) is not True:
        raise metadata.fail(f"{metadata.prefix}expert_weights_norm is not true, and other experts are not supported")


def _stablelm_residual(config: dict, metadata: Metadata) -> None:
    """The parallel form has one norm a block, so the tensors say which form it is."""
    parallel = "blk.0.ffn_norm.weight" not in metadata.file.tensors
    stated = metadata.get("use_parallel_residual")
    if isinstance(stated, bool) and stated != parallel:
        raise metadata.fail(f"{metadata.prefix}use_parallel_residual is {stated}, but the tensors say {parallel}")
    config["use_parallel_residual"] = parallel


RULES: dict[str, Callable[[dict, Metadata], None]] = {
    **ROPE_RULES,
    "llama_head_dim": _llama_head_dim,
    "gemma_scale": _gemma_scale,
    "gemma2_layers": _gemma2_layers,
    "gemma3_layers": _gemma3_layers,
    "every_fourth_full": _every_fourth_full,
    "gpt_oss_layers": _gpt_oss_layers,
    "smollm3_layers": _smollm3_layers,
    "lfm2_layers": _lfm2_layers,
    "normalised_experts": _normalised_experts,
    "sigmoid_experts": _sigmoid_experts,
    "mamba_heads": _mamba_heads,
    "granite_layers": _granite_layers,
    "nemotron_layers": _nemotron_layers,
    "delta_layers": _delta_layers,
    "olmo3_ropes": _olmo3_ropes,
    "mistral3_ropes": _mistral3_ropes,
    "stablelm_residual": _stablelm_residual,
    "gemma4_layers": gemma4_layers,
}
