"""Read and write the tiles that `castiron tune` found: the file `tuned.json` in the cache."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from castiron.emitter.kernels.matmul.schedule import Tiles
from castiron.emitter.kernels.matmul.selection import kernel_of, read_tiles
from castiron.emitter.kernels.matmul_spec import Matmul
from castiron.emitter.kernels.mlir.isa import Isa
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.files import KERNEL_SOURCES, sources_hash
from castiron.vmfb.bundle.json_record import RecordError, from_json, to_json
from castiron.vmfb.cache_folder import cache_path, keep
from castiron.vmfb.compiler.iree_compile import compiler_version
from castiron.vmfb.cpu_features import host_cpu
from castiron.vmfb.targets import Target

# By the name of a matmul: the values of the fields of its tiles (`Tiles`).
TileFields = Mapping[str, Mapping[str, int]]

SCHEMA = 2


@dataclass(frozen=True)
class Key:
    """The conditions of a measurement; isa: of the kernels; kernels: hash of their sources."""

    cpu: str
    isa: str
    iree: str
    kernels: str
    threads: int


@dataclass(frozen=True)
class Finding:
    """The tiles of a matmul, None for the default; gain: time with the default / with these."""

    key: Key
    product: str
    tiles: dict[str, int] | None
    gain: float


@dataclass(frozen=True)
class _Store:
    schema: int
    findings: tuple[Finding, ...]


def store_path() -> Path:
    return cache_path("tuned")


def key_of(target: Target, threads: int) -> Key:
    """Return the conditions of a measurement on this machine."""
    return Key(host_cpu(), target.isa, compiler_version(), sources_hash(*KERNEL_SOURCES)[:16], threads)


def read_findings() -> tuple[Finding, ...]:
    """Return the stored results; () if the file is absent, PipelineError if it is invalid."""
    path = store_path()
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise RecordError(f"its field 'schema' is not {SCHEMA}")
        return from_json(_Store, value).findings
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ()
    except (ValueError, RecursionError, RecordError) as error:
        raise PipelineError(f"{path} is not a file of castiron tune ({error}); delete it, or compile with --no-tuned") from None


def add_findings(findings: Iterable[Finding]) -> bool:
    """Store results, which replace earlier ones; return whether the file could be written."""
    merged = {(finding.key, finding.product): finding for finding in (*read_findings(), *findings)}
    text = json.dumps(to_json(_Store(SCHEMA, tuple(merged.values()))), indent=1)
    return keep(store_path(), text.encode() + b"\n")


def findings_of(key: Key) -> dict[str, Finding]:
    return {finding.product: finding for finding in read_findings() if finding.key == key}


def tuned_tiles(options: Options, target: Target) -> TileFields:
    """Return the tiles that `castiron tune` found for this machine, if the options can use them."""
    if not options.tuned or options.target != "host" or options.lowering != "kernels":
        return {}
    findings = findings_of(key_of(target, options.threads_or_cores))
    return {name: finding.tiles for name, finding in findings.items() if finding.tiles is not None}


def tiles_for(matmul: Matmul, tuned: TileFields, isa: Isa, threads: int) -> Tiles | None:
    if matmul.name not in tuned:
        return None
    try:
        tiles = read_tiles(matmul, tuned[matmul.name])
        kernel_of(matmul, isa, threads, tiles)
        return tiles
    except ValueError as error:
        raise PipelineError(f"{store_path()} has invalid tiles: {error}; delete the file, or compile with --no-tuned") from None
