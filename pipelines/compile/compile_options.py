"""The options of `castiron compile`, and values computed from them."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from castiron.emitter.abi import LOWERINGS, NUMERICS, QUANTISED, STORAGE, WEIGHTS
from castiron.emitter.graph.types import EmitError
from castiron.emitter.models import read_config
from castiron.emitter.shorten import shorten
from castiron.vmfb.cpu_features import physical_cores
from castiron.vmfb.targets import is_gpu

# Max values, in positions, of the defaults of `Options.context` and `Options.max_context`.
DEFAULT_CONTEXT, MAX_CONTEXT = 8192, 131072
# Default of `Options.threads` for another machine.
DEFAULT_THREADS = 2

# The lowering for GPUs.
GPU_LOWERING = "gpu"

# Called with the name of a stage and its finished fraction, 0 to 1.
Progress = Callable[[str, float], None]


def _integer(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


# By annotation of a field: what checks and converts a value, and what to call a valid one in an error message.
KINDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "str": (_text, "text"), "bool": (_flag, "True or False"),
    "int | None": (lambda value: None if value is None else _integer(value), "an integer or None"),
    "str | None": (lambda value: None if value is None else _text(os.fspath(value)), "a path or None"),
    "tuple[int, ...]": (lambda value: tuple(map(_integer, value)), "integers"),
    "tuple[str, ...]": (lambda value: (value,) if isinstance(value, str) else tuple(map(_text, value)), "texts"),
}  # fmt: skip
# Former names of fields, which the Python API still accepts.
FORMER_NAMES = {"cache": "kv_cache_type", "speculate": "verify_widths"}
# Fields whose values are names, in any case.
NAMES = ("weights", "numerics", "kv_cache_type", "lowering")


@dataclass(frozen=True)
class Options:
    """The options of `castiron compile`; EmitError for invalid values.

    context: default max tokens of a sequence; None: the model's limit, at most 8192.
    max_context: largest context with which the bundle can be opened; None: see `max_context_of`.
    lowering: empty: kernels for the target's CPU or GPU. target: of `vmfb.targets.resolve`.
    prefill, embed, verify_widths: tokens per call of functions; batch: sequences per call.
    threads: among which kernels divide their work; None: one per core.
    iree_flags: flags for iree-compile after castiron's own.
    """

    context: int | None = None
    max_context: int | None = None
    weights: str = "native"
    requantise: bool = False
    adapter: str | None = None
    calibrate: str | None = None
    numerics: str = "exact"
    kv_cache_type: str = "f32"
    lowering: str = ""
    target: str = "host"
    prefill: tuple[int, ...] = (8, 32, 128)
    batch: tuple[int, ...] = (4, 8)
    verify_widths: tuple[int, ...] = (2, 4, 8)
    embed: tuple[int, ...] = ()
    threads: int | None = None
    tuned: bool = True
    ignore_keys: tuple[str, ...] = ()
    iree_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            convert, wanted = KINDS[str(each.type)]
            try:
                value = convert(value)
            except (TypeError, ValueError):
                raise EmitError(f"{each.name} is {shorten(value)}; it must be {wanted}") from None
            object.__setattr__(self, each.name, value.lower() if each.name in NAMES else value)
        if not self.lowering:
            object.__setattr__(self, "lowering", GPU_LOWERING if is_gpu(self.target) else "kernels")
        if self.lowering == ("kernels" if is_gpu(self.target) else GPU_LOWERING):
            raise EmitError(f"lowering {self.lowering!r} does not support target {self.target}; leave the lowering out")
        known = {"weights": WEIGHTS, "numerics": NUMERICS, "kv_cache_type": STORAGE, "lowering": LOWERINGS}
        for name, allowed in known.items():
            if getattr(self, name) not in allowed:
                raise EmitError(f"unknown {name}: {getattr(self, name)!r}; use one of {', '.join(allowed)}")
        for name, limit in (("batch", 64), ("verify_widths", 64), ("embed", 512)):
            sizes = getattr(self, name)
            if len(set(sizes)) != len(sizes) or min(sizes, default=2) < 2 or max(sizes, default=0) > limit:
                raise EmitError(f"{name} is {', '.join(map(str, sizes))}; give distinct sizes from 2 to {limit}")
        if self.calibrate and self.weights not in QUANTISED:
            raise EmitError(
                f"cannot calibrate weights {self.weights!r}; use a quantised type such as q4_k, or leave calibrate out"
            )
        if self.max_context is not None and self.max_context < (self.context or 1):
            raise EmitError(f"max_context is {self.max_context}; it must be at least the context, {self.context or 1}")
        if self.threads is not None and self.threads < 1:
            raise EmitError(f"threads is {self.threads}; it must be at least 1")
        if bad := [flag for flag in self.iree_flags if not flag.startswith("--")]:
            example = "--iree-flag=--iree-opt-level=O2"
            raise EmitError(f"flag of iree-compile does not start with --: {bad[0]!r}; give it as in {example}")

    def for_one_sequence(self) -> Options:
        """Return a copy with only the functions for one prompt at a time."""
        return replace(self, prefill=self.prefill[1:2] or self.prefill, batch=(), verify_widths=())

    @classmethod
    def for_draft(cls, target: str = "host") -> Options:
        """Return options for a fast draft model, whose tokens the main model verifies."""
        # Kernels for GPUs do not round activations.
        numerics = "exact" if is_gpu(target) else "draft"
        return cls(
            weights="q4_0", requantise=True, numerics=numerics, prefill=(8, 32), batch=(), verify_widths=(), target=target
        )  # fmt: skip

    @property
    def threads_or_cores(self) -> int:
        """Return `threads`; by default physical cores, or 2 if the target is another machine."""
        return self.threads or (physical_cores() if self.target == "host" else DEFAULT_THREADS)


def context_of(config: dict, options: Options) -> int:
    """Return the bundle's default context in tokens."""
    if options.context is not None:
        return options.context
    return min(read_config(config).max_positions, DEFAULT_CONTEXT, options.max_context or DEFAULT_CONTEXT)


def max_context_of(config: dict, options: Options) -> int:
    """Return the largest context, in tokens, with which the bundle can be opened."""
    if options.max_context is not None:
        return options.max_context
    context = context_of(config, options)
    # A large state costs kernels no time or memory, because they use only its used positions. The portable lowering reads
    # all positions, and a GPU has memory for all.
    if options.lowering == "portable" or is_gpu(options.target):
        return context
    return max(context, min(read_config(config).max_positions, MAX_CONTEXT))
