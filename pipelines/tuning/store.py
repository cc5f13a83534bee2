"""What tuning found, kept in one file for all models: `tuned.json` under the cache root."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from castiron.emitter.kernels.products.choosing import kernel_of, read_tiles
from castiron.emitter.kernels.products.frame import Tiles
from castiron.emitter.kernels.products.product import Product
from castiron.emitter.kernels.writing.isa import Isa
from castiron.pipelines.casting.sources import sources_hash
from castiron.pipelines.errors import PipelineError
from castiron.vmfb import cache
from castiron.vmfb.compiler import compiler_version
from castiron.vmfb.cpu import host_cpu
from castiron.vmfb.record import RecordError, from_json, to_json
from castiron.vmfb.targets import Target

# By a product's name, the fields of its tiles.
FieldsByProduct = Mapping[str, Mapping[str, int]]

SCHEMA = 2
# Where products' kernels are written; with what it imports, it decides their code.
KERNELS = "castiron.emitter.kernels.products"


class StoreError(PipelineError):
    """A store that is not to be trusted; one sentence with what to do."""


@dataclass(frozen=True)
class Key:
    """What a measurement holds for: CPU model, instruction set of the kernels, version of IREE, hash of the kernels'
    sources, threads."""

    cpu: str
    isa: str
    iree: str
    kernels: str
    threads: int


@dataclass(frozen=True)
class Finding:
    """The best `tiles` of a product by name, as fields of its tiles; None where nothing beat the default.

    gain: the default's time over theirs, 1 for the default.
    """

    key: Key
    product: str
    tiles: dict[str, int] | None
    gain: float


@dataclass(frozen=True)
class _Store:
    schema: int
    findings: tuple[Finding, ...]


def store_path() -> Path:
    """Where the findings stand; the file need not exist."""
    return cache.cache_place("tuned")


def key_of(target: Target, threads: int) -> Key:
    """What holds for code that this machine compiles for `target`, run on `threads` threads of it."""
    return Key(host_cpu(), target.isa, compiler_version(), sources_hash(KERNELS)[:16], threads)


def read() -> tuple[Finding, ...]:
    """All findings; none where there is no file to be read. StoreError for a file that `keep` cannot have written."""
    path = store_path()
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict) or value.get("schema") != SCHEMA:
            raise RecordError(f"it has no schema {SCHEMA}")
        return from_json(_Store, value).findings
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ()
    except (OSError, ValueError, RecursionError, RecordError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise StoreError(f"{path} is not what castiron tune writes ({reason}); delete it, or compile with --no-tuned") from None


def findings_of(key: Key) -> dict[str, Finding]:
    """By the product's name, what was found under `key`."""
    return {finding.product: finding for finding in read() if finding.key == key}


def tiles_of(key: Key) -> FieldsByProduct:
    """The tiles that beat the default under `key`."""
    return {name: finding.tiles for name, finding in findings_of(key).items() if finding.tiles is not None}


def keep(findings: Iterable[Finding]) -> bool:
    """Adds the findings to the file, over what it had for the same products and keys; False, and a word on stderr, if it cannot
    be written."""
    found = {(finding.key, finding.product): finding for finding in (*read(), *findings)}
    text = json.dumps(to_json(_Store(SCHEMA, tuple(found.values()))), indent=1)
    return cache.keep(store_path(), text.encode() + b"\n")


def choose(product: Product, chosen: FieldsByProduct, isa: Isa, threads: int) -> Tiles | None:
    """The product's tiles, or None if there are none; StoreError for some that its kernel does not take."""
    if product.name not in chosen:
        return None
    try:
        tiles = read_tiles(product, chosen[product.name])
        kernel_of(product, isa, threads, tiles)
        return tiles
    except ValueError as error:
        raise StoreError(f"{store_path()} has tiles that do not fit ({error}); delete it, or compile with --no-tuned") from None
