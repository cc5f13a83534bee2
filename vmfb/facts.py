"""What a manifest tells of how its bundle was made: `source` and `compile` are open, and what of them is read has a type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from castiron.vmfb.record import RecordError, from_json, short

_LARGEST = 2**63


@dataclass(frozen=True)
class KernelWork:
    """What a kernel does in one call of a function: in how many `calls` of its own, and in one of these FLOP and bytes as [at
    position 0, per position, largest]. weights: those of the bytes that are weights. paths: the modules that it is of. tokens:
    how many rows a product has."""

    calls: int
    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    weights: int = 0
    paths: tuple[str, ...] = ()
    tokens: int | None = None


@dataclass(frozen=True)
class Hub:
    repository: str
    revision: str
    file: str | None = None


@dataclass(frozen=True)
class Text:
    path: str
    sha256: str


@dataclass(frozen=True)
class Adapter:
    path: str
    sha256: str
    rank: int


@dataclass(frozen=True)
class Repacked:
    module: str
    sha256: str
    runtime: str


KNOWN: Mapping[str, Mapping[str, Any]] = {
    "source": {"model": str, "path": str, "format": str, "sha256": str, "ignored_keys": tuple[str, ...],
               "left_out": dict[str, int], "hub": Hub, "adapter": Adapter, "calibrated": Text},
    "compile": {"key": str, "threads": int, "products": tuple[str, ...], "tuned": dict[str, Any],
                "arithmetic": dict[str, int], "work": dict[str, dict[str, KernelWork]], "repacked": Repacked},
}  # fmt: skip


def check_facts(name: str, facts: Mapping[str, Any]) -> None:
    """RecordError unless what the manifest's field `name` says is of the types of `KNOWN`."""
    found = {key: from_json(kind, facts[key], f"{name}.{key}") for key, kind in KNOWN[name].items() if key in facts}
    for kernel, work in [pair for kernels in found.get("work", {}).values() for pair in kernels.items()]:
        amounts = (work.calls, work.weights, *work.flops, *work.bytes)
        if len(work.flops) != 3 or len(work.bytes) != 3 or min(amounts) < 0 or max(amounts) >= _LARGEST:
            raise RecordError(f"{name}.work says of {short(kernel)} what no kernel does")
