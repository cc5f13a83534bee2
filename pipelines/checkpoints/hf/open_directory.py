"""Open an HF directory as a Checkpoint: config.json, safetensors and tokenizer files."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from castiron.emitter.models import family
from castiron.emitter.shorten import shorten, shorten_list, shorten_text
from castiron.pipelines.checkpoints.checkpoint import (
    EMBEDDINGS,
    HEAD,
    Checkpoint,
    CheckpointError,
    Tensor,
    inconsistent,
    is_ignorable,
    reject_impossible_sizes,
    without,
    without_shared,
)
from castiron.pipelines.checkpoints.column_order import column_orders
from castiron.pipelines.checkpoints.hf import encoding_files, tensor_layouts, tokenizer_files
from castiron.pipelines.checkpoints.hf.quantised_weights import quantised_weights
from castiron.pipelines.checkpoints.hf.read_files import PART_TYPES, json_object, read_safetensors, unsupported_type
from castiron.pipelines.checkpoints.hf.tokenizer_files import HfTokenizer, read_tokenizer

CONFIG, GENERATION = "config.json", "generation_config.json"
MODELOPT = "hf_quant_config.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# The files that `open_hf_directory` opens, except those that other files list; * is any name in a folder.
_SMALL_FILES = (CONFIG, GENERATION, MODELOPT, INDEX, *tokenizer_files.FILES, *encoding_files.FILES)
# Max bytes of a file name.
_MAX_NAME = 255


def open_hf_directory(path: Path, ignore_keys: Sequence[str] = ()) -> Checkpoint:
    """Return the checkpoint in a directory, without the config keys `ignore_keys`."""
    full_config = json_object(path / CONFIG)
    if full_config is None:
        raise CheckpointError(f"{path} has no config.json; give a directory as HF's save_pretrained writes it")
    if not isinstance(full_config.get("model_type"), str):
        raise CheckpointError(f"{path / CONFIG} has no model_type")
    has_weights = any((path / name).exists() for name in (SINGLE, INDEX))
    if not has_weights and full_config["model_type"] not in tensor_layouts.TEXT_PARTS:
        # Report an unsupported model first, because downloading the missing weights would not help.
        family(full_config)
    quantisation, scales = quantization_config(path, full_config), {}
    stored = tensor_layouts.base_names(tensors_of(path, quantisation is not None))
    if quantisation:
        stored, scales = quantised_weights(path, quantisation, stored)
    config = without(tensor_layouts.text_config(full_config, stored), ignore_keys, path / CONFIG)
    config.pop("quantization_config", None)
    if not isinstance(config.get("model_type"), str):
        raise CheckpointError(f"{path / CONFIG} has no model_type in its text_config")
    generation = json_object(path / GENERATION) or {}
    tensors, left_out = tensor_layouts.text_tensors(full_config["model_type"], stored)
    left_out |= scales
    tokenizer, sources = read_tokenizer(path, full_config), (generation, full_config, config)
    template = encoding_files.reranker_template(path, full_config, tokenizer.chat_template)
    encoding = (
        encoding_files.read_token_reranker(path, full_config, tensors, tokenizer.content or {}, template)
        or encoding_files.read_encoding(path, full_config)
        or encoding_files.read_classifier(path, full_config, stored)
    )
    if encoding:
        tensors.pop("score.weight", None)
        if HEAD in tensors and any(name in tensors for name in EMBEDDINGS):
            del tensors[HEAD]
            left_out |= {"lm_head": 1}
    reject_impossible_sizes(path, config, {name: tensor.shape for name, tensor in tensors.items()})
    tensors = tensor_layouts.with_embedding(tensor_layouts.family_tensors(config["model_type"], tensors), config)
    tensors, orders = column_orders(without_shared(tensors, config))
    for tensor in tensors.values():
        if tensor.codec in PART_TYPES:
            raise unsupported_type(path, tensor.name, tensor.codec)
    if encoding:
        tensors |= encoding.tensors
    bos = next(iter(_token_ids(path, "bos_token_id", *sources)), None)
    return Checkpoint(
        path=path,
        format="hf",
        config=config,
        tensors=tensors,
        tokenizer=tokenizer.content,
        special_tokens=tokenizer.special_tokens,
        chat_template=template or tokenizer.chat_template if encoding and encoding.relevance else tokenizer.chat_template,
        bos_token_id=next(iter(tokenizer.ids("bos_token")), None) if bos is None else bos,
        eos_token_ids=_end_tokens(path, generation, (full_config, config), tokenizer),
        generation_config=generation,
        left_out=left_out,
        quantization_config=quantisation,
        column_orders=orders,
        encoding=encoding,
    )


def small_files(names: Iterable[str]) -> list[str]:
    """Return the files of a repository that are read, except those that one of them lists."""
    is_read = lambda name: any(fnmatchcase(name, p) and name.count("/") == p.count("/") for p in _SMALL_FILES)
    return [name for name in names if is_read(name)]


def shards_of(path: Path) -> dict[str, list[str] | None]:
    """Return the names of tensors by safetensors file; None for a model without an index."""
    if (path / SINGLE).exists():
        return {SINGLE: None}
    index = json_object(path / INDEX)
    if index is None:
        raise CheckpointError(f"{path} has neither {SINGLE} nor {INDEX}; save the model as safetensors")
    files = index.get("weight_map")
    if not isinstance(files, dict) or not all(isinstance(shard, str) for shard in files.values()):
        raise CheckpointError(f"{path / INDEX} has no weight_map of tensor names to files")
    shards: dict[str, list[str] | None] = {}
    for name, shard in files.items():
        if Path(shard).name != shard or "\0" in shard or len(shard.encode()) > _MAX_NAME:
            raise CheckpointError(f"{path / INDEX}: {shorten_text(name)} is in {shorten(shard)}, which is not a file name")
        shards.setdefault(shard, []).append(name)
    return shards


def quantization_config(path: Path, config: dict) -> dict | None:
    """Return the config's, its text_config's or ModelOpt's quantization_config, or None."""
    for part in (config, config.get("text_config")):
        if isinstance(part, dict) and isinstance(quantisation := part.get("quantization_config"), dict):
            return quantisation
    quantisation = (json_object(path / MODELOPT) or {}).get("quantization")
    return {"quant_method": "modelopt", **quantisation} if isinstance(quantisation, dict) else None


def tensors_of(path: Path, is_quantised: bool) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shard, expected in shards_of(path).items():
        if not (path / shard).is_file():
            raise CheckpointError(f"{path / shard} is missing, but {INDEX} lists it; download the complete model")
        stored = read_safetensors(path / shard, allow_parts=is_quantised)
        if absent := sorted(name for name in set(expected or ()) - set(stored) if not is_ignorable(name)):
            raise inconsistent(path, f"{shard} lacks {shorten_list(absent)}, which {INDEX} lists")
        if twice := stored.keys() & tensors.keys():
            raise inconsistent(path, f"{shard} has tensor {shorten_text(min(twice))}, which is also in another shard")
        tensors |= stored
    return tensors


def _token_ids(path: Path, key: str, *sources: dict) -> tuple[int, ...]:
    value = next((source[key] for source in sources if source.get(key) is not None), [])
    tokens = value if isinstance(value, list) else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in tokens):
        raise CheckpointError(f"{path}: {key} is {shorten(value)}, not a token id")
    return tuple(tokens)


def _end_tokens(path: Path, generation: dict, configs: Sequence[dict], tokenizer: HfTokenizer) -> tuple[int, ...]:
    """Return the ids of generation_config.json, of the tokenizer and of config.json.

    In many files the last is the default of HF's class, perhaps an ordinary token. So it counts
    only if it is an added token, or there are no others.
    """
    vocab = configs[-1].get("vocab_size")
    fits = lambda token: not isinstance(vocab, int) or token < vocab
    stated = (*_token_ids(path, "eos_token_id", generation), *filter(fits, tokenizer.ids("eos_token")))
    of_configs = [token for config in configs for token in _token_ids(path, "eos_token_id", config)]
    is_end = lambda token: fits(token) and (tokenizer.content is None or tokenizer.is_added(token))
    return tuple(dict.fromkeys((*stated, *(filter(is_end, of_configs) if stated else of_configs))))
