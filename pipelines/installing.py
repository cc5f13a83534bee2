"""How to install what is missing, as it works from where the user is: in a clone of the project, or with its wheel."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import castiron

# Third-party modules that are imported when they are asked for, and the extra of pyproject.toml that brings each.
EXTRAS = {
    "iree.compiler": "compile", "gguf": "compile", "safetensors": "compile",
    "torch": "verify", "transformers": "verify", "accelerate": "verify", "peft": "verify", "sentencepiece": "verify",
    "huggingface_hub": "hub", "cryptography": "sign",
    "starlette": "serve", "uvicorn": "serve", "h11": "serve", "pydantic": "serve", "llama_cpp": "bench", "matplotlib": "bench",
    "pyarrow": "parquet", "ray": "ray",
}  # fmt: skip
# The target of the Makefile that installs each extra.
TARGETS = {
    "compile": "compile-llm", "serve": "compile-llm", "hub": "compile-llm", "verify": "test", "parquet": "test",
    "sign": "test", "ray": "test", "bench": "bench",
}  # fmt: skip


def remedy(module: str | None) -> str | None:
    """What to type for a third-party module that is missing; None for one that castiron does not ask for."""
    extra = next((EXTRAS[name] for name in (module or "", (module or "").partition(".")[0]) if name in EXTRAS), None)
    if extra is None:
        return None
    if (root := clone()) is not None:
        place = shlex.quote(f"{root}[{extra}]")
        return f"make {TARGETS[extra]} in {root}, or {shlex.quote(sys.executable)} -m pip install -e {place}"
    return f"{shlex.quote(sys.executable)} -m pip install {' '.join(map(shlex.quote, requirements(extra)))}"


def clone() -> Path | None:
    """The folder of the project that this castiron runs from; None where it was installed from a wheel."""
    root = Path(castiron.__file__).parents[1]
    return root if (root / "pyproject.toml").is_file() and (root / "Makefile").is_file() else None


def requirements(extra: str) -> list[str]:
    """The packages of an extra, as the metadata of the installed castiron has them."""
    import importlib.metadata

    marker = f'extra == "{extra}"'
    lines = (line.partition(";") for line in importlib.metadata.requires("castiron") or ())
    return [name.strip() for name, _, condition in lines if condition.strip().replace("'", '"') == marker]
