"""What a bundle says of itself: `manifest.json`, schema 2."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from castiron.vmfb.record import Json, RecordError, from_json, to_json
from castiron.vmfb.targets import Target

SCHEMA = 2  # since 2, kernels leave a batch's rows alone whose position is negative
ROLES = ("decode", "prefill", "verify", "batch")
MODEL, WEIGHTS, TOKENIZER, TEMPLATE, LOG, TEXT = (
    "model.vmfb", "weights.irpa", "tokenizer.json", "chat_template.jinja", "compile.log", "model.mlir",
)  # fmt: skip
# Every file that a bundle may hold besides the manifest, and whether it must.
FILES: dict[str, bool] = {MODEL: True, WEIGHTS: True, TOKENIZER: False, TEMPLATE: False, LOG: False, TEXT: False}
CACHE_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2}


class BundleError(Exception):
    """A bundle that cannot be written, read or run here; one sentence with what to do."""


@dataclass(frozen=True)
class Cache:
    """The two caches k and v, each `[layers, context, kv_heads, head_dim]` of `dtype`."""

    layers: int
    context: int
    kv_heads: int
    head_dim: int
    dtype: str = "f32"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.layers, self.context, self.kv_heads, self.head_dim)

    @property
    def type(self) -> str:
        return "x".join(map(str, self.shape)) + f"x{self.dtype}"


@dataclass(frozen=True)
class Function:
    """An exported function: its role, how many tokens one call takes, and its signature as MLIR spells the types."""

    role: str
    name: str
    width: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def functions(
    cache: Cache, vocab: int, widths: Sequence[int], verify: Sequence[int] = (), batches: Sequence[int] = ()
) -> tuple[Function, ...]:
    """What every castiron module exports: `decode_step`, a `prefill_T` for each of `widths`, a `verify_T` for each of
    `verify` (results at all T positions) and a `decode_batch_B` for each of `batches` (B sequences, whose caches stand
    one after another)."""
    outputs = ("i32", f"{vocab}xf32", cache.type, cache.type)
    found = [Function("decode", "decode_step", 1, ("i32", "i32", cache.type, cache.type), outputs)]
    for width in widths:
        inputs = (f"{width}xi32", "i32", "i32", cache.type, cache.type)
        found.append(Function("prefill", f"prefill_{width}", width, inputs, outputs))
    for width in verify:
        inputs, rows = (f"{width}xi32", "i32", cache.type, cache.type), (f"{width}xi32", f"{width}x{vocab}xf32")
        found.append(Function("verify", f"verify_{width}", width, inputs, (*rows, cache.type, cache.type)))
    for size in batches:
        caches = (replace(cache, layers=size * cache.layers).type,) * 2
        inputs, rows = (f"{size}xi32", f"{size}xi32", *caches), (f"{size}xi32", f"{size}x{vocab}xf32")
        found.append(Function("batch", f"decode_batch_{size}", size, inputs, (*rows, *caches)))
    return tuple(found)


@dataclass(frozen=True)
class Tokens:
    """Ids that a generation starts and ends with."""

    bos: int | None = None
    eos: tuple[int, ...] = ()


@dataclass(frozen=True)
class Versions:
    """What made the bundle; `iree` is iree-base-compiler's version, to which the runtime must match."""

    castiron: str
    iree: str


@dataclass(frozen=True)
class File:
    """Size in bytes and sha256 in hex of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`config`, `generation`, `source`, `accuracy`, `speed` and `compile` are facts for people and pipelines; vmfb only
    carries them. `codecs` counts the weights' tensors by codec. `files` is filled in by BundleWriter.
    """

    name: str
    config: dict
    vocab: int
    cache: Cache
    functions: tuple[Function, ...]
    numerics: str
    lowering: str
    weights: str
    codecs: dict[str, int]
    target: Target
    versions: Versions
    tokens: Tokens = Tokens()
    generation: dict = field(default_factory=dict)
    source: dict = field(default_factory=dict)
    compile: dict = field(default_factory=dict)
    accuracy: Json | None = None
    speed: Json | None = None
    files: dict[str, File] = field(default_factory=dict)
    schema: int = SCHEMA

    @property
    def context(self) -> int:
        return self.cache.context

    @property
    def prefill_widths(self) -> tuple[int, ...]:
        """Ascending."""
        return self.widths("prefill")

    def widths(self, role: str) -> tuple[int, ...]:
        """Tokens that one call of each function of this role takes, ascending."""
        return tuple(sorted(function.width for function in self.functions if function.role == role))

    def function(self, role: str, width: int = 1) -> Function:
        """The function of that role and width; KeyError if there is none."""
        return {(f.role, f.width): f for f in self.functions}[role, width]


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`; keys in the order of the fields."""
    return (json.dumps(to_json(manifest), indent=2, ensure_ascii=False) + "\n").encode()


def parse(data: bytes, place: str) -> Manifest:
    """The manifest in `data`; BundleError, naming `place`, for what this version does not know or cannot be."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{place} is not JSON ({error}); compile the bundle again") from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise BundleError(
            f"{place} has schema {schema!r} and this castiron reads {SCHEMA}; "
            "compile the bundle again, or use the castiron that made it"
        )
    try:
        manifest = from_json(Manifest, value)
        check(manifest)
    except RecordError as error:
        raise BundleError(f"{place}: {error}; compile the bundle again") from None
    return manifest


def check(manifest: Manifest) -> None:
    """RecordError unless the manifest's parts agree with each other."""
    cache, widths = manifest.cache, {role: [f.width for f in manifest.functions if f.role == role] for role in ROLES}
    chunks = widths["prefill"] + widths["verify"]
    for name, value in (("vocab", manifest.vocab), *((f"cache.{n}", getattr(cache, n)) for n in
                        ("layers", "context", "kv_heads", "head_dim"))):  # fmt: skip
        if value < 1:
            raise RecordError(f"{name} is {value}, not a positive number")
    if cache.dtype not in CACHE_ITEM_BYTES:
        raise RecordError(f"cache.dtype is {cache.dtype!r}, not one of {', '.join(CACHE_ITEM_BYTES)}")
    if bad := [w for w in chunks if not 2 <= w <= cache.context]:
        raise RecordError(f"a prefill or verify function takes {bad[0]} tokens where the context is {cache.context}")
    known = functions(cache, manifest.vocab, widths["prefill"], widths["verify"], widths["batch"])
    if manifest.functions != known or any(len(set(w)) != len(w) or min(w, default=2) < 1 for w in widths.values()):
        raise RecordError("functions are not those of a castiron module with this vocabulary and cache")
    for name, file in manifest.files.items():
        if name not in FILES:
            raise RecordError(f"files.{name} is not a file that this version knows")
        if file.size < 0 or not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise RecordError(f"files.{name} has no proper size and sha256")
    tokens = (manifest.tokens.bos, *manifest.tokens.eos)
    if bad := [t for t in tokens if t is not None and not 0 <= t < manifest.vocab]:
        raise RecordError(f"tokens names {bad[0]}, outside the vocabulary of {manifest.vocab}")
