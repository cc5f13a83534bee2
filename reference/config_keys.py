"""Which keys of a config.json HF's classes define or read: writes `castiron.emitter.models.hf_keys`.

    python -m castiron.reference.config_keys

after a change of the locked transformers or of the families; a test holds the file to what this writes.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from castiron.emitter.models import ENCODERS, FAMILIES, hf_keys

# Modules of transformers that every family's model runs through, and what they read of its config.
SHARED_MODULES = ("modeling_rope_utils", "masking_utils", "cache_utils")
# Read while the weights are loaded: they are then other weights.
OF_LOADING = {"quantization_config"}
HEADER = '''\
"""Keys of a config.json that HF's classes define or read, by model type: written by `castiron.reference.config_keys`.

A key that is in neither table is one that HF's model never sees. Of transformers {version}.
"""

# Read of every family's config, where it has them.
SHARED = frozenset(
    """
{shared}
    """.split()
)

# Of each model type, what its config class defines and its model reads besides.
DEFINED = {{
{families}
}}
'''


def source() -> str:
    """The text of `hf_keys.py` for the installed transformers and castiron's families."""
    base = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    methods = {name for name in dir(PreTrainedConfig) if callable(getattr(PreTrainedConfig, name))} - base
    shared = {key for name in SHARED_MODULES for key in _reads(importlib.import_module(f"transformers.{name}"))}
    shared = _public(shared | OF_LOADING) - methods
    families = []
    for model_type in sorted((*FAMILIES, *ENCODERS)):
        keys = _public(_defined(model_type)) - base - shared - methods
        families.append(f'    "{model_type}": frozenset(\n        """\n{_words(keys, 8)}\n        """.split()\n    ),')
    return HEADER.format(version=transformers.__version__, shared=_words(shared, 4), families="\n".join(families))


def _defined(model_type: str) -> set[str]:
    """Fields of the class, other names of them, and what its two modules take of a config or of the class's arguments."""
    class_ = CONFIG_MAPPING[model_type]
    place = class_.__module__
    modules = [importlib.import_module(place), importlib.import_module(place.replace(".configuration_", ".modeling_"))]
    found = {field.name for field in dataclasses.fields(class_)} | set(class_.attribute_map)
    # A module may hold classes of several types: gemma3_text's holds that of its vision tower's parent too.
    return found | {key for module in modules for key in _reads(module)}


def _public(names: set[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def _reads(module: ModuleType) -> Iterator[str]:
    """Attributes of what is called config, by dot or by getattr, and keyword arguments that are popped."""
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


def _words(keys: set[str], indent: int) -> str:
    margin = " " * indent
    return textwrap.fill(" ".join(sorted(keys)), 120, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)


if __name__ == "__main__":
    Path(hf_keys.__file__).write_text(source(), encoding="utf-8")
