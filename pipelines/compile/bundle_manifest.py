"""Build the manifest of a new bundle: model, source, and the FLOP and bytes of each kernel."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import castiron
from castiron.emitter.graph.ir import Graph, Module
from castiron.emitter.kernels.matmul.selection import numerics_of
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import ISAS, Isa
from castiron.emitter.models import read_config
from castiron.pipelines.checkpoints.adapter import adapter_sha256, open_adapter
from castiron.pipelines.checkpoints.checkpoint import Checkpoint
from castiron.pipelines.compile.build_model import EncoderSizes, encoder_sizes
from castiron.pipelines.compile.calibration import text_sha256
from castiron.pipelines.compile.compile_options import Options, context_of, max_context_of
from castiron.pipelines.compile.tile_store import TileFields
from castiron.pipelines.compile.weight_codecs import codecs_of
from castiron.pipelines.locate import as_text, model_name, source_of
from castiron.pipelines.text.derive_tool_format import tool_format_of
from castiron.vmfb.bundle.manifest import EncoderConfig, Manifest, Tokens, Versions
from castiron.vmfb.compiler.iree_compile import compiler_version
from castiron.vmfb.targets import Target


def manifest_of(
    model: str | Path,
    checkpoint: Checkpoint,
    sha256: str,
    options: Options,
    target: Target,
    module: Module,
    tiles: TileFields,
    compile_info: dict,
) -> Manifest:
    """Return the manifest of a new bundle, except `files` and `accuracy`, which are added later.

    model: as the user gave it. sha256: of the checkpoint. compile_info: for the field `compile`.
    """
    first, config, sizes = next(iter(module.functions.values())), checkpoint.config, encoder_sizes(checkpoint, options)
    context = sizes.context if sizes else context_of(config, options)
    max_context = sizes.context if sizes else max_context_of(config, options)
    functions = tuple(f.entry for f in module.functions.values() if f.entry)
    return Manifest(
        name=model_name(checkpoint.path),
        config=config,
        vocab=read_config(config).vocab,
        context=context,
        max_context=max_context,
        states=first.states,
        functions=functions,
        original_context=read_config(config).original_context if any(f.is_long for f in functions) else None,
        hidden=next((f.outputs[0].shape[-1] for f in module.functions.values() if f.output_names[0] != "argmax"), 0),
        encoder=_encoder(checkpoint, sizes) if sizes else None,
        numerics=options.numerics,
        has_same_bits=options.lowering == "kernels" and _has_same_bits(module, ISAS[target.isa]),
        lowering=options.lowering,
        weights=options.weights,
        codecs=dict(sorted(Counter(codecs_of(checkpoint, options.weights, options.requantise).values()).items())),
        target=target,
        versions=Versions(castiron.__version__, compiler_version()),
        tokens=Tokens(
            checkpoint.bos_token_id, tuple(checkpoint.eos_token_ids), dict(checkpoint.fim_token_ids), checkpoint.special_tokens
        ),
        generation=checkpoint.generation_config,
        tool_format=_tool_format(checkpoint),
        source=_source(model, checkpoint, sha256, options),
        compile=compile_info | _module_facts(module, options, target, tiles, max_context),
    )


def _source(model: str | Path, checkpoint: Checkpoint, sha256: str, options: Options) -> dict:
    path_of = lambda path: as_text(os.path.abspath(path))
    source = {
        "model": as_text(model),
        "path": path_of(checkpoint.path),
        "format": checkpoint.format,
        "sha256": sha256,
        "ignored_keys": list(options.ignore_keys),
        "left_out": dict(checkpoint.left_out),
    }
    if hub := source_of(checkpoint.path):
        source["hub"] = hub
    if options.adapter:
        adapter = Path(options.adapter)
        source["adapter"] = {
            "path": path_of(adapter), "sha256": adapter_sha256(adapter), "rank": open_adapter(adapter).rank
        }  # fmt: skip
    if options.calibrate:
        source["calibrated"] = {"path": path_of(options.calibrate), "sha256": text_sha256(options.calibrate)}
    return source


def _tool_format(checkpoint: Checkpoint) -> dict | None:
    added = (checkpoint.tokenizer or {}).get("added_tokens") or ()
    texts = {token["id"]: token["content"] for token in added}
    ids = {"bos_token": checkpoint.bos_token_id, "eos_token": next(iter(checkpoint.eos_token_ids), None)}
    special = checkpoint.special_tokens
    if special is None:
        special = {name: texts[index] for name, index in ids.items() if index in texts}
    form = tool_format_of(checkpoint.chat_template, special)
    return asdict(form) if form else None


def _encoder(checkpoint: Checkpoint, sizes: EncoderSizes) -> EncoderConfig:
    encoding = checkpoint.encoding
    return EncoderConfig(
        encoding.pooling.mode, encoding.pooling.normalised, sizes.single_call, sizes.max_tokens,
        tuple(dense.features for dense in encoding.pooling.dense), dict(encoding.prompts), encoding.default_prompt,
        encoding.lower_case, encoding.relevance, encoding.types,
    )  # fmt: skip


def _matmuls(module: Module) -> list[Matmul]:
    kernels = [op.attrs["kernel"] for f in module.functions.values() for op in f.ops if op.kind == "kernel"]
    return list(dict.fromkeys(kernel.matmul for kernel in kernels if kernel.matmul))


def _has_same_bits(module: Module, isa: Isa) -> bool:
    # A matmul of two activations outside kernels adds in an order of the compiler's.
    has_other_matmuls = any(op.kind == "dot_general" for f in module.functions.values() for op in f.ops)
    return not has_other_matmuls and all(m.numerics == numerics_of(m, isa, "canonical") for m in _matmuls(module))


def _module_facts(module: Module, options: Options, target: Target, tiles: TileFields, context: int) -> dict:
    matmuls = _matmuls(module)
    names = [matmul.name for matmul in matmuls]
    return {
        "work": {name: work_of(function, context) for name, function in module.functions.items()},
        "threads": options.threads_or_cores,
        "matmuls": names,
        "tuned": {name: tiles[name] for name in names if name in tiles},
        "arithmetic": _arithmetic(matmuls, target),
    }


def _arithmetic(matmuls: Sequence[Matmul], target: Target) -> dict[str, int]:
    if not target.isa:
        return {}
    isa = ISAS[target.isa]
    conversions = {
        **{f"int{8 * n}": f"x in integers of {8 * n} bits by {isa.dot}" for n in (1, 2, 3)},
        "bf16_pairs": f"x and weights rounded to bf16 by {isa.pairs}",
        "bf16_matrix": f"x and weights rounded to bf16 by {isa.matrix}",
        "bf16_split": f"x in exact pieces of bf16 by {isa.matrix}",
    }
    return dict(Counter(conversions[matmul.numerics] for matmul in matmuls if matmul.numerics in conversions))


def work_of(function: Graph, context: int) -> dict[str, dict]:
    """Return the fields of `manifest.KernelWork` for each kernel of a function, by its name."""
    work: dict[str, dict] = {}
    weights = {value for op in function.ops if op.kind == "parameter" for value in op.results}
    for op in function.ops:
        if op.kind != "kernel":
            continue
        kernel = op.attrs["kernel"]
        entry = work.setdefault(kernel.name, {"paths": [], "calls": 0})
        path = re.sub(r"\.\d+(?=\.|$)", ".*", op.path) or "output"
        if path not in entry["paths"]:
            entry["paths"].append(path)
        entry["calls"] += 1
        if entry["calls"] == 1:
            first, second, last = (kernel.work(p) for p in (0, 1, context - 1))
            for unit, start, step, end in zip(("flops", "bytes"), first, second, last):
                entry[unit] = [start, step - start, end]
            # A call reads only a part of an embedding or of experts, so their size is an upper
            # bound. If the bytes grow with the position, the kernel reads a state and no weights.
            weight_bytes = sum(value.type.nbytes for value in op.operands if value in weights)
            entry["weights"] = 0 if second[1] > first[1] else min(weight_bytes, first[1])
            if kernel.matmul:
                entry["tokens"] = kernel.matmul.tokens
    return work
