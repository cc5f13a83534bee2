"""Errors whose message is shown to the user, and commands that install missing packages."""

from __future__ import annotations

import errno
import os
import shlex
import sys
from collections.abc import Collection, Iterable
from pathlib import Path

import castiron

# How Python and the loader of libraries report that memory, or the number of threads, has run out.
EXHAUSTED = ("can't start new thread", "failed to map segment", "Cannot allocate memory")
# Names in other libraries -> names here.
RENAMED = {
    "max_new_tokens": "max_tokens", "num_predict": "max_tokens", "stop": "stop_strings", "repetition_penalty": "repeat_penalty",
    "chat_template_kwargs": "template_args", "n_ctx": "context", "num_ctx": "context", "max_model_len": "context",
    "n_threads": "threads", "draft_model": "draft", "human": "user", "ai": "assistant", "bot": "assistant",
    "model": "assistant", "function": "tool",
}  # fmt: skip


class PipelineError(Exception):
    """Raised if a command or request cannot be carried out; the message is for the user."""


class CheckpointError(Exception):
    """Raised if a checkpoint is invalid or not supported; the message is one line for the user."""


# Module and class of each error. A class is looked up only in modules that are already imported: a module that isn't
# cannot have failed, and importing torch or the compiler is slow.
USER_ERRORS = (
    ("castiron.pipelines.errors", "PipelineError"),
    ("castiron.pipelines.errors", "CheckpointError"),
    ("castiron.emitter.graph.types", "EmitError"),
    ("castiron.vmfb.compiler.iree_compile", "CompileError"),
    ("castiron.vmfb.targets", "TargetError"),
    ("castiron.vmfb.bundle.manifest", "BundleError"),
    ("castiron.vmfb.bundle.irpa", "WeightsError"),
    ("castiron.vmfb.device.program", "SessionError"),
    ("castiron.vmfb.device.gpus", "DeviceError"),
    ("castiron.vmfb.run.state_file", "StateError"),
)
# Extra of pyproject.toml -> the modules that it provides.
EXTRAS = {
    "compile": "iree.compiler gguf safetensors",
    "verify": "torch transformers accelerate peft sentencepiece",
    "hub": "huggingface_hub",
    "serve": "fastapi httptools prometheus_client pydantic starlette uvicorn",
    "bench": "llama_cpp",
    "terminal": "prompt_toolkit shtab",
    "parquet": "pyarrow",
    "ray": "ray",
}


def user_errors() -> tuple[type[Exception], ...]:
    """Return the exception classes, of imported modules, whose message is for the user."""
    found = (getattr(sys.modules.get(module), name, None) for module, name in USER_ERRORS)
    return tuple(error for error in found if error is not None)


def error_message(error: Exception) -> str | None:
    """Return the message to show for an error; None if the error is a bug of castiron."""
    from castiron.vmfb.file_errors import reason

    if isinstance(error, user_errors()):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        path = error.filename
        if path is None and error.errno == errno.ENOSPC:
            # Only writes to stdout raise this error without a file name.
            path = "stdout"
        return f"{path}: {reason(error)}" if path is not None else reason(error)
    if isinstance(error, RuntimeError | ImportError) and any(text in str(error) for text in EXHAUSTED):
        return f"out of memory or threads: {error}; close other programs, or raise the limits (ulimit -v, ulimit -u)"
    if isinstance(error, MemoryError):
        return "out of memory; close other programs or use a smaller model or --context"
    if isinstance(error, ModuleNotFoundError) and (command := install_command(error.name)):
        return f"{error.name} is not installed: {command}"
    return None


def install_command(module: str | None) -> str | None:
    """Return the command that installs a module; None if no optional extra of castiron has it."""
    names = {module, (module or "").partition(".")[0]}
    extra = next((extra for extra, modules in EXTRAS.items() if not names.isdisjoint(modules.split())), None)
    if extra is None:
        return None
    root = Path(castiron.__file__).parents[1]
    in_clone = (root / "pyproject.toml").is_file() and (root / "Makefile").is_file()
    packages = ["-e", f"{root}[{extra}]"] if in_clone else requirements(extra)
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def requirements(extra: str) -> list[str]:
    """Return the packages that an optional extra of castiron requires, from its metadata."""
    import importlib.metadata

    marker = f'extra == "{extra}"'
    lines = (line.partition(";") for line in importlib.metadata.requires("castiron-llm") or ())
    return [name.strip() for name, _, condition in lines if condition.strip().replace("'", '"') == marker]


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return "; did you mean X?", where X is the most similar known name; "" if none is similar."""
    near = RENAMED[name] if RENAMED.get(name) in known else _closest(name, known)
    return f"; did you mean {near}?" if near else ""


def similar_path(path: str | os.PathLike) -> str:
    """Return "; did you mean PATH?" with an existing path that is spelled similarly, or ""."""
    asked = Path(os.fsdecode(path))
    found = Path(asked.anchor)
    for part in asked.parts[len(found.parts) :]:
        name: str | None = part
        if not (found / part).exists():
            try:
                name = _closest(part, sorted(each for each in os.listdir(found) if not each.startswith(".")))
            except OSError:
                name = None
        if name is None:
            return ""
        found /= name
    return f"; did you mean {found}?" if found != asked else ""


def _closest(name: str, known: Collection[str]) -> str | None:
    from difflib import get_close_matches

    by_lower, name = {each.lower(): each for each in known}, name.lower()
    near = get_close_matches(name, by_lower) or [each for each in by_lower if len(name) > 2 and name in each]
    return by_lower[near[0]] if near else None


def check_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError if a name in `given` is not in `known`, and suggest a similar known name."""
    for name in given:
        if name not in known:
            raise TypeError(f"unknown option: {name}{did_you_mean(name, known)}")
