"""The options of `castiron compile`, validated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from castiron.emitter.abi import NUMERICS, STORAGE
from castiron.emitter.lowering import LOWERINGS
from castiron.emitter.models import read_config
from castiron.emitter.types import EmitError
from castiron.pipelines.compile.weights import QUANTISED, WEIGHTS
from castiron.vmfb.cpu import physical_cores

# Limits of the default number of positions of a session, and of those that the states have.
DEFAULT_CONTEXT, MAX_CONTEXT = 8192, 131072
# Threads of a bundle for another machine than this.
DEFAULT_THREADS = 2

# Called with the name of a stage and the share of it that is done.
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Options:
    """The options of `castiron compile`.

    context: positions of a session, unless it is opened with another number; None takes the model's
    limit, at most 8192.
    max_context: positions that states have addresses for; None takes the model's limit, at most
    131,072.
    weights: "native" keeps the checkpoint's types; "f32", "bf16" and "f16" convert every matrix;
    other values quantise.
    adapter: path of a PEFT directory; it is merged before the weights are converted.
    calibrate: path of a text on which the importance of each column is measured for quantising.
    numerics: "exact", "canonical" or "fast".
    cache: element type of KV caches, "f32", "f16" or "q8_0"; other states are f32.
    lowering: "kernels" or "portable". target: "host" or a name of `castiron.vmfb.targets.TARGETS`.
    prefill: tokens per call of the prefill functions; those wider than the context are left out.
    batch: sequences per call of the decode_batch functions.
    speculate: tokens per call of the verify functions.
    embed: tokens per call of the functions that return hidden states.
    threads: number of threads among which kernels divide their work; None takes one per physical
    core.
    tuned: whether tiles that `castiron tune` found are used; only for the target "host".
    ignore_keys: keys of the config, or of the GGUF metadata, that are left out.
    iree_flags: flags for iree-compile after castiron's own, one word each.
    """

    context: int | None = None
    max_context: int | None = None
    weights: str = "native"
    adapter: str | None = None
    calibrate: str | None = None
    numerics: str = "exact"
    cache: str = "f32"
    lowering: str = "kernels"
    target: str = "host"
    prefill: tuple[int, ...] = (8, 32, 128)
    batch: tuple[int, ...] = (4, 8)
    speculate: tuple[int, ...] = (4, 8)
    embed: tuple[int, ...] = ()
    threads: int | None = None
    tuned: bool = True
    ignore_keys: tuple[str, ...] = ()
    iree_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {"weights": WEIGHTS, "numerics": NUMERICS, "cache": STORAGE, "lowering": LOWERINGS}
        for name, allowed in known.items():
            if getattr(self, name) not in allowed:
                raise EmitError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name, limit in (("batch", 64), ("speculate", 64), ("embed", 512)):
            sizes = getattr(self, name)
            if len(set(sizes)) != len(sizes) or min(sizes, default=2) < 2 or max(sizes, default=0) > limit:
                raise EmitError(f"{name} takes distinct sizes from 2 to {limit}, not {', '.join(map(str, sizes))}")
        if self.calibrate and self.weights not in QUANTISED:
            raise EmitError(f"calibrate needs quantised weights, and weights is {self.weights!r}; choose a quantised type")
        if self.max_context is not None and self.max_context < (self.context or 1):
            raise EmitError(f"max_context is {self.max_context}; it must be at least the context, {self.context or 1}")
        if self.threads is not None and self.threads < 1:
            raise EmitError(f"threads is {self.threads}; it must be at least 1")
        if bad := [flag for flag in self.iree_flags if not flag.startswith("--")]:
            raise EmitError(
                f"{bad[0]!r} is not a flag of iree-compile; give one complete flag, as --iree-flag=--iree-opt-level=O2"
            )

    def for_one_sequence(self) -> Options:
        """Return these options with the functions that suffice for one prompt at a time."""
        return replace(self, prefill=self.prefill[1:2] or self.prefill, batch=(), speculate=())

    @property
    def threads_or_cores(self) -> int:
        """Return `threads`, or their default: this machine's cores, or 2 for another target."""
        return self.threads or (physical_cores() if self.target == "host" else DEFAULT_THREADS)


def context_of(config: dict, options: Options) -> int:
    """Return the default context: the requested one, or the model's limit, at most 8192."""
    if options.context is not None:
        return options.context
    return min(read_config(config).max_positions, DEFAULT_CONTEXT, options.max_context or DEFAULT_CONTEXT)


def max_context_of(config: dict, options: Options) -> int:
    """Return the positions of the states: those requested, or the model's limit, at most 131,072.

    Kernels read only the positions that are used; StableHLO reads all, and gets the default
    context.
    """
    if options.max_context is not None:
        return options.max_context
    context = context_of(config, options)
    return context if options.lowering == "portable" else max(context, min(read_config(config).max_positions, MAX_CONTEXT))
