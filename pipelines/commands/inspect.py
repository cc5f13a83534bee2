"""Describes a bundle, or a checkpoint before it is compiled; without an argument, lists the catalogue, and what is read: model
types, architectures and types of GGUF files."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from castiron.pipelines.commands.options import add_model, megabytes
from castiron.pipelines.harmless import harmless
from castiron.pipelines.places import is_bundle
from castiron.pipelines.progress import Progress

if TYPE_CHECKING:
    from castiron.vmfb.manifest import Manifest

EXAMPLES = """\
examples:
  castiron inspect
  castiron inspect model.gguf --tensors
  castiron inspect build/smollm2-135m-instruct --json

--json prints one object: for a bundle its manifest; for a checkpoint path, format, config, ignored_keys (what trainers leave
in a config and no model reads), left_out (how many tensors are no part of a text's model, by what their names begin with),
refused (why compile would not take the config, or null), parameters, tensors, tokenizer, chat_template, bos_token_id,
eos_token_ids, encodes (whether it is a model for embeddings); without an argument catalogue, families (values of
model_type), encoders, text_parts (of models that also see or hear), gguf_architectures, gguf_types, safetensors_types.
"""
# Of config.json, what tells one model from another.
SHOWN_CONFIG = (
    "model_type", "num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "tie_word_embeddings",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, metavar="MODEL|DIR", nargs="?", help="a checkpoint, a name, or a bundle")
    parser.add_argument("--tensors", action="store_true", help="list every tensor of a checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    if args.model is None:
        facts, lines = catalogue()
    elif is_bundle(Path(args.model)):
        facts, lines = bundle(args.model)
    else:
        facts, lines = checkpoint(args.model, args.tensors)
    print(json.dumps(facts, ensure_ascii=False) if args.json else harmless("\n".join(lines)))
    return 0


def catalogue() -> tuple[dict, list[str]]:
    from dataclasses import asdict

    from castiron.emitter.models import ENCODERS, FAMILIES
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE
    from castiron.pipelines.checkpoints.gguf_architectures import architecture_names
    from castiron.pipelines.checkpoints.gguf_file import CODEC_OF_GGML_TYPE
    from castiron.pipelines.checkpoints.safetensors_file import CODEC_OF_DTYPE
    from castiron.pipelines.checkpoints.text_part import TEXT_PARTS

    read = {
        "families": sorted(FAMILIES),
        "encoders": sorted(ENCODERS),
        "text_parts": sorted(TEXT_PARTS),
        "gguf_architectures": sorted(architecture_names()),
        "gguf_types": [codec.upper() for codec in CODEC_OF_GGML_TYPE.values()],
        "safetensors_types": list(CODEC_OF_DTYPE),
    }
    names = ("families", "encoders alone", "their text alone", "GGUF architectures", "GGUF types", "safetensors types")
    lines = [f"{m.name:<28} {megabytes(m.size):>10}  {m.licence}" for m in CATALOGUE.values()]
    for name, row in zip(names, read.values(), strict=True):
        indent = " " * 20
        lines += ["", *textwrap.wrap(f"{name:<20}{', '.join(row)}", 100, subsequent_indent=indent, break_on_hyphens=False)]
    return {"catalogue": [asdict(model) for model in CATALOGUE.values()], **read}, lines


def bundle(path: str) -> tuple[dict, list[str]]:
    from castiron.pipelines.measuring.memory import needed, slots_of, warn_of_shortage
    from castiron.vmfb.bundle import open_bundle
    from castiron.vmfb.manifest import dump

    manifest = open_bundle(path, run=False).manifest
    slots = slots_of(manifest)
    warn_of_shortage(manifest)
    states = ", ".join(f"{state.name} {state.type()} {state.kind}" for state in manifest.states)
    source = manifest.source
    rows = [
        ("bundle", f"{manifest.name} ({manifest.config.get('model_type', 'unknown type')})"),
        ("from", f"{source.get('path') or source.get('model', 'unknown')} ({source.get('format', '?')})"),
        *(("on the hub", " ".join(hub.values())) for hub in [source.get("hub")] if hub),
        *[("ignored keys", ", ".join(keys) + " (by --ignore-key)") for keys in [source.get("ignored_keys")] if keys],
        *left_out(source.get("left_out", {})),
        *(("adapter", adapter(found)) for found in [source.get("adapter")] if found),
        *(("calibrated", f"on {text['path']} (sha256 {text['sha256'][:16]}…)") for text in [source.get("calibrated")] if text),
        ("numerics", manifest.numerics + arithmetic(manifest.compile)),
        ("made with", f"{manifest.lowering} lowering, {manifest.weights} weights, {manifest.cache} cache"),
        ("weights", ", ".join(f"{count} {codec}" for codec, count in manifest.codecs.items())),
        *encoder(manifest),
        ("context", f"{manifest.context} positions"),
        ("states", states),
        ("memory", f"{needed(manifest)}, in castiron serve {needed(manifest, slots)}" if slots > 1 else str(needed(manifest))),
        ("functions", ", ".join(function.name for function in manifest.functions)),
        ("target", f"{manifest.target.name} ({manifest.target.arch}, {manifest.target.isa or 'no kernels'})"),
        ("tuned", tuned(manifest.compile)),
        *(("module", f"not castiron's: {made['module']} ({made['sha256'][:16]}…)") for made in repacked(manifest.compile)),
        ("versions", f"castiron {manifest.versions.castiron}, IREE {manifest.versions.iree}"),
        ("tokenizer", "yes" if "tokenizer.json" in manifest.files else "none: takes token ids only"),
        ("tool calls", manifest.tool_form or "none that the chat template has a known form for"),
        *(("accuracy", str(value)) for value in [manifest.accuracy] if value),
        *(("speed", json.dumps(value)) for value in [manifest.speed] if value),
        *((name, f"{megabytes(file.size)}  sha256 {file.sha256[:16]}…") for name, file in manifest.files.items()),
    ]
    return json.loads(dump(manifest)), table(rows)


def encoder(manifest: Manifest) -> list[tuple[str, str]]:
    """Rows that say how a bundle encodes texts, if it does."""
    if (facts := manifest.encoder) is None:
        return []
    dense = "".join(f", a layer of {features}" for features in facts.dense)
    if facts.relevance:
        size = f"two texts of at most {facts.max_tokens} tokens together"
        return [("reranks", f"{size}: {facts.pooling} pooling, {facts.relevance} of one number")]
    vector = f"{manifest.hidden} numbers{' of length 1' * facts.normalised}"
    rows = [("encodes", f"texts of at most {facts.max_tokens} tokens: {facts.pooling} pooling{dense}, vectors of {vector}")]
    usual = f"; {facts.default_prompt} unless another is named" if facts.default_prompt is not None else ""
    return [*rows, ("prompts", ", ".join(facts.prompts) + usual)] if facts.prompts else rows


def arithmetic(facts: dict) -> str:
    """What products do to x, out of the facts about a compilation; nothing where all of them multiply f32."""
    found, products = facts.get("arithmetic"), facts.get("products", ())
    return f" ({'; '.join(f'{n} of {len(products)} products {way}' for way, n in found.items())})" if found else ""


def left_out(counts: Mapping[str, int]) -> list[tuple[str, str]]:
    """A row that names the tensors left out, if there are any."""
    from castiron.pipelines.checkpoints.text_part import in_words

    return [("left out", in_words(counts))] if counts else []


def adapter(facts: dict) -> str:
    """What a manifest says of the adapter that was merged into the weights."""
    return f"{facts['path']} of rank {facts['rank']}, merged (sha256 {facts['sha256'][:16]}…)"


def tuned(facts: dict) -> str:
    """How many products of a bundle have tiles by castiron tune, out of the facts about its compilation."""
    found, products = facts.get("tuned"), facts.get("products", ())
    if not found:
        return "no"
    threads = facts.get("threads", "?")
    return f"{len(found)} of {len(products)} matrix products, for {threads} thread{'s' * (threads != 1)}"


def repacked(facts: dict) -> list[dict]:
    """What castiron repack says of the module that it put into a bundle, if it did."""
    return [facts["repacked"]] if "repacked" in facts else []


def checkpoint(path: str, tensors: bool) -> tuple[dict, list[str]]:
    from castiron.emitter.codecs import row_bytes
    from castiron.pipelines.checkpoints import open_checkpoint

    with Progress() as progress:
        found = open_checkpoint(path, progress)
    # Sizes come from shapes: reading a tensor could mean computing it.
    sizes = {
        name: prod(tensor.shape[:-1]) * row_bytes(tensor.codec, tensor.shape[-1]) for name, tensor in found.tensors.items()
    }
    ignored, refused = understood(found.config)
    elements = sum(prod(tensor.shape) for tensor in found.tensors.values())
    counts = Counter(tensor.codec for tensor in found.tensors.values())
    rows = [
        ("checkpoint", f"{found.path} ({found.format})"),
        *((name, str(found.config[name])) for name in SHOWN_CONFIG if name in found.config),
        ("parameters", f"{elements:,} in {len(found.tensors)} tensors, {megabytes(sum(sizes.values()))}"),
        ("tensors", ", ".join(f"{count} {codec}" for codec, count in counts.most_common())),
        *left_out(found.left_out),
        *[("encodes", f"texts, by {how.pooling.mode} pooling") for how in [found.encoding] if how],
        ("tokenizer", "yes" if found.tokenizer else "none: a bundle of it takes token ids only"),
        ("chat template", "yes" if found.chat_template else "none"),
        *[("ignored keys", f"{', '.join(ignored)} (no part of the mathematics)")] * bool(ignored),
        *[("not compiled", refused)] * (refused is not None),
        ("end of text", ", ".join(map(str, found.eos_token_ids)) or "unknown"),
    ]
    lines = table(rows)
    if tensors:
        lines += [f"  {name}  {list(t.shape)}  {t.codec}  {megabytes(sizes[name])}" for name, t in found.tensors.items()]
    facts = {
        "path": str(found.path),
        "format": found.format,
        "config": found.config,
        "ignored_keys": list(ignored),
        "left_out": dict(found.left_out),
        "refused": refused,
        "parameters": elements,
        "tensors": {
            name: {"shape": list(t.shape), "codec": t.codec, "bytes": sizes[name]} for name, t in found.tensors.items()
        },
        "tokenizer": found.tokenizer is not None,
        "chat_template": found.chat_template,
        "bos_token_id": found.bos_token_id,
        "eos_token_ids": list(found.eos_token_ids),
        "encodes": found.encoding is not None,
    }
    return facts, lines


def understood(config: dict) -> tuple[tuple[str, ...], str | None]:
    """Keys of the config that compiling passes over, and the sentence with which it refuses the config, if it does."""
    from castiron.emitter.models import ignored_keys
    from castiron.emitter.types import EmitError

    try:
        return ignored_keys(config), None
    except EmitError as error:
        return (), str(error)


def table(rows: list[tuple[str, str]]) -> list[str]:
    """Lines with the names in one column."""
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {value}" for name, value in rows]
