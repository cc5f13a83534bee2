"""Write `emitter/models/hf_keys.json`: the keys that HF models may have in their config.json.

    python -m castiron.reference.config_keys

Run it after an update of transformers, and when castiron supports a new model type. A test checks
that the file is up to date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from transformers import CONFIG_MAPPING, PreTrainedConfig

from castiron.emitter import models

PATH = Path(models.__file__).with_name("hf_keys.json")
# Modules of transformers that read every family's config.
SHARED_MODULES = ("modeling_rope_utils", "masking_utils", "cache_utils")
# Keys that HF reads when it loads weights; the weights depend on them.
OF_LOADING = {"quantization_config"}


def source() -> str:
    """Return the text of `hf_keys.json` for the installed transformers: one line per model type."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    methods = {name for name in dir(PreTrainedConfig) if callable(getattr(PreTrainedConfig, name))} - base
    shared = {key for name in SHARED_MODULES for key in _reads(importlib.import_module(f"transformers.{name}"))}
    shared = (shared | OF_LOADING) - methods
    keys = {"shared": shared}
    for model_type in sorted((*models.FAMILIES, *models.ENCODERS)):
        keys[model_type] = _defined(model_type) - base - shared - methods
    rows = (f'"{name}": {json.dumps(sorted(n for n in names if n[0] != "_"))}' for name, names in keys.items())
    return "{\n" + ",\n".join(rows) + "\n}\n"


def _defined(model_type: str) -> set[str]:
    class_ = CONFIG_MAPPING[model_type]
    name = class_.__module__
    modules = [importlib.import_module(name), importlib.import_module(name.replace(".configuration_", ".modeling_"))]
    found = {field.name for field in dataclasses.fields(class_)} | set(class_.attribute_map)
    # A module may define several model types: gemma3_text's also defines gemma3, with vision.
    return found | {key for module in modules for key in _reads(module)}


def _reads(module: ModuleType) -> Iterator[str]:
    """Yield the config keys that a module's source code reads."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Attribute(value=value, attr=name) if _is_config(value):
                yield name
            case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[value, ast.Constant(name), *_]) if _is_config(value):
                yield name
            case ast.Call(func=ast.Attribute(ast.Name("kwargs"), "pop" | "get"), args=[ast.Constant(name), *_]):
                yield name


def _is_config(node: ast.expr) -> bool:
    return ast.unparse(node).rpartition(".")[2].endswith("config")


if __name__ == "__main__":
    PATH.write_text(source(), encoding="utf-8")
