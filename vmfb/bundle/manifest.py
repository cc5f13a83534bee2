"""The manifest of a bundle, `manifest.json`, as dataclasses, and its validation."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from castiron.emitter.abi import ROLES, Function, Signature, State, functions, ring_rows
from castiron.vmfb.bundle.json_record import Json, RecordError, from_json, short, to_json
from castiron.vmfb.targets import Target

SCHEMA = 10
MANIFEST = "manifest.json"
MODEL, WEIGHTS, TOKENIZER, TABLE, TEMPLATE, LOG, TEXT, DEVICE = (
    "model.vmfb", "weights.irpa", "tokenizer.json", "tokenizer.table", "chat_template.jinja", "compile.log", "model.mlir",
    "device.vmfb",
)  # fmt: skip
# The files that a bundle may have besides the manifest and more modules, and whether they are required.
FILES = dict.fromkeys((MODEL, WEIGHTS), True) | dict.fromkeys((TOKENIZER, TABLE, TEMPLATE, LOG, TEXT, DEVICE), False)
# The module with all functions of one width, which share kernels: `tokens_32.vmfb` for 32 tokens.
_MODULE = re.compile(r"tokens_[0-9]+\.vmfb")
# Maximum size in bytes of files that are read into memory.
_MAX_BYTES = dict.fromkeys((TOKENIZER, TABLE, TEMPLATE), 100_000_000)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
# Largest difference from a known answer, as a share of the largest expected value: f32 sums in another order differ by less.
TOLERANCE = 1e-3


class BundleError(Exception):
    """Raised for a bundle that cannot be written or read, or that cannot run on this machine."""


def module_name(function: Function) -> str:
    """Return the .vmfb file with the functions of this width, such as `tokens_32.vmfb`."""
    return f"tokens_{function.width}.vmfb"


def is_module(name: str) -> bool:
    return name == MODEL or _MODULE.fullmatch(name) is not None


def is_bundle_file(name: str) -> bool:
    return name == MANIFEST or name in FILES or is_module(name)


@dataclass(frozen=True)
class Tokens:
    """Special tokens: `bos` starts a text, and each of `eos` ends a generation.

    fim: ids of fill-in-the-middle tokens by llama.cpp's names: pre, suf, mid, pad, rep and sep.
    special: texts for the chat template, such as bos_token; None for those of `bos` and `eos[0]`.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    fim: dict[str, int] = field(default_factory=dict)
    special: dict[str, str] | None = None


@dataclass(frozen=True)
class Versions:
    """The versions that made the bundle; the IREE runtime must have that of the compiler."""

    castiron: str
    iree: str


@dataclass(frozen=True)
class Accuracy:
    """How much logits of "fast" numerics differ from those of `against`, on `tokens` tokens.

    context: tokens of each chunk of `text`. kld_*: Kullback-Leibler divergence in nats: mean, its
    standard error, 99th percentile, maximum. same_top_p: fraction of equal argmaxes.
    """

    against: str
    text: str
    context: int
    tokens: int
    kld_mean: float
    kld_error: float
    kld_99: float
    kld_maximum: float
    same_top_p: float
    same_top_p_error: float

    def __str__(self) -> str:
        return (
            f"against {self.against} over {self.tokens} tokens: mean KLD {self.kld_mean:.6f} ± {self.kld_error:.6f}, 99.0% "
            f"{self.kld_99:.6f}, same top p {100 * self.same_top_p:.1f} ± {100 * self.same_top_p_error:.1f} %"
        )


@dataclass(frozen=True)
class EncoderConfig:
    """The properties of an embedding model or a reranker.

    pooling: how the vectors of tokens become one: mean, last or cls.
    single_call: whether one call must take the complete text (bidirectional attention).
    max_tokens: longer texts are cut to this length, prompt and special tokens included.
    dense: output features of each linear layer after the pooling.
    relevance: a reranker's function from output to score, sigmoid or identity; None otherwise.
    types: whether there are token types (BERT); a token of a pair's second text is id + vocab.
    """

    pooling: str
    normalised: bool
    single_call: bool
    max_tokens: int
    dense: tuple[int, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False
    relevance: str | None = None
    types: bool = False


@dataclass(frozen=True)
class File:
    """The size of a file in bytes and its sha256 in hex."""

    size: int
    sha256: str


@dataclass(frozen=True)
class KnownLogits:
    """Expected logits of decode steps from position 0: `logits[step]` of the tokens `ids`."""

    tokens: tuple[int, ...]
    ids: tuple[int, ...]
    logits: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class KnownAnswer:
    """Results for fixed inputs, which a GPU must reproduce before it runs the bundle."""

    matmuls: dict[str, tuple[float, ...]] = field(default_factory=dict)
    decode: KnownLogits | None = None
    tolerance: float = TOLERANCE


@dataclass(frozen=True)
class Manifest:
    """The contents of a bundle's `manifest.json`.

    vocab, context, max_context: in tokens; the functions support contexts up to `max_context`.
    original_context: sequences of more tokens run the functions with `is_long`; None without these.
    states: those of one sequence, in the order of the functions' operands.
    weights: the format that the user chose, such as "q4_0"; "native" is the checkpoint's.
    codecs: number of weight tensors by codec.
    compile: how the bundle was compiled, and the FLOP and bytes of each kernel.
    files: size and hash of each file; BundleWriter sets it.
    hidden: length of the vectors that functions return; 0 if they return none.
    encoder: None for a model that generates text.
    tool_format: the fields of `text.tool_formats.ToolFormat`.
    known_answer: None for a CPU.
    has_same_bits: whether all functions give logits with the same bits, on every CPU.
    """

    name: str
    config: dict
    vocab: int
    context: int
    max_context: int
    states: tuple[State, ...]
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
    accuracy: Accuracy | None = None
    speed: Json | None = None
    files: dict[str, File] = field(default_factory=dict)
    hidden: int = 0
    encoder: EncoderConfig | None = None
    tool_format: dict | None = None
    known_answer: KnownAnswer | None = None
    original_context: int | None = None
    has_same_bits: bool = False
    schema: int = SCHEMA

    @property
    def cache(self) -> str:
        """Return the format of the KV caches, "f32", "f16" or "q8_0"; "f32" if there are none."""
        return next((state.storage for state in self.states if state.kind != "recurrent"), "f32")

    @property
    def sha256(self) -> str:
        """Return the hash of manifest.json with `context` set to `max_context`."""
        return hashlib.sha256(dump(replace(self, context=self.max_context))).hexdigest()

    def widths(self, role: str) -> tuple[int, ...]:
        """Return the widths of the functions with a role such as "prefill", in ascending order."""
        return tuple(sorted({function.width for function in self.functions if function.role == role}))

    def function(self, role: str, width: int = 1, is_long: bool = False) -> Function:
        """Return the function with a role, such as "prefill", and a width; KeyError if absent."""
        return {(f.role, f.width, f.is_long): f for f in self.functions}[role, width, is_long]

    def is_long(self, tokens: int) -> bool:
        """Return whether functions with `is_long` run a sequence of `tokens` tokens."""
        return self.original_context is not None and tokens > self.original_context

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the file names of the compiled modules, sorted."""
        return tuple(sorted(name for name in self.files if is_module(name)))

    def module_of(self, function: Function) -> str:
        name = module_name(function)
        return name if name in self.files else MODEL

    def signature(self, function: Function) -> Signature:
        """Return the names and tensor types of a function's operands and results."""
        return function.signature(self.states, self.vocab, self.hidden)


@dataclass(frozen=True)
class KernelWork:
    """The work of one kernel in a call of a compiled function.

    flops, bytes: at position 0, and the increase per position.
    """

    calls: int
    flops: tuple[int, ...]
    bytes: tuple[int, ...]
    weights: int = 0
    paths: tuple[str, ...] = ()
    tokens: int | None = None


@dataclass(frozen=True)
class Hub:
    """The repository on the Hugging Face hub that a checkpoint came from."""

    repository: str
    revision: str
    file: str | None = None


@dataclass(frozen=True)
class Input:
    """A file or folder that the bundle was compiled from."""

    path: str
    sha256: str


@dataclass(frozen=True)
class Adapter(Input):
    """A LoRA adapter that was merged into the weights."""

    rank: int


@dataclass(frozen=True)
class CustomModule:
    """A compiled module with which the user replaced all compiled modules of a bundle."""

    module: str
    sha256: str
    runtime: str


# Types of the keys of `source` and `compile` that commands read.
_FACTS: Mapping[str, Mapping[str, Any]] = {
    "source": {"model": str, "path": str, "format": str, "sha256": str, "ignored_keys": tuple[str, ...],
               "left_out": dict[str, int], "hub": Hub, "adapter": Adapter, "calibrated": Input},
    "compile": {"key": str, "threads": int, "matmuls": tuple[str, ...], "tuned": dict[str, Any],
                "arithmetic": dict[str, int], "work": dict[str, dict[str, KernelWork]], "custom_module": CustomModule},
}  # fmt: skip


def _check_facts(name: str, facts: Mapping[str, Any]) -> None:
    found = {key: from_json(kind, facts[key], f"{name}.{key}") for key, kind in _FACTS[name].items() if key in facts}
    for kernel, work in [pair for kernels in found.get("work", {}).values() for pair in kernels.items()]:
        amounts = (work.calls, work.weights, *work.flops, *work.bytes)
        if len(work.flops) != 3 or len(work.bytes) != 3:
            lengths = f"{len(work.flops)} numbers in 'flops' and {len(work.bytes)} in 'bytes'"
            raise RecordError(
                f"manifest field '{name}.work': kernel {short(kernel)} has {lengths}; give 3 in each: the "
                "value at position 0, its increase per position, its maximum"
            )
        if wrong := [amount for amount in amounts if not 0 <= amount < 2**63]:
            number = "a negative number" if wrong[0] < 0 else "a number above 2**63 - 1"
            raise RecordError(
                f"manifest field '{name}.work': kernel {short(kernel)} has {number}; use numbers from 0 to 2**63 - 1"
            )


def dump(manifest: Manifest) -> bytes:
    return (json.dumps(to_json(manifest), indent=2, ensure_ascii=False) + "\n").encode()


def parse(data: bytes, path: str) -> Manifest:
    """Parse the manifest in `data`, read from `path`; raise BundleError if it is invalid."""
    try:
        value = json.loads(data)
        if _SURROGATE.search(data):
            # A lone surrogate cannot be printed.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BundleError(f"not JSON: {path} ({short(str(error), 100)}); compile the bundle again") from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise BundleError(
            f"bundle has manifest schema {short(repr(schema))}, but this castiron reads schema {SCHEMA}: {path}; "
            "compile the bundle again, or use the castiron version that compiled the bundle"
        )
    try:
        manifest = from_json(Manifest, value)
        check(manifest)
    except RecordError as error:
        raise BundleError(f"invalid manifest {path}: {short(str(error), 200)}; compile the bundle again") from None
    return manifest


def check(manifest: Manifest) -> None:
    """Raise RecordError if fields of the manifest contradict each other."""
    minimum = {"vocab": 1, "context": 1, "hidden": int(bool(manifest.widths("embed") or manifest.encoder))}
    for name, smallest in minimum.items():
        if (value := getattr(manifest, name)) < smallest:
            raise RecordError(f"manifest field {name!r} is {value}; it must be at least {smallest}")
    if manifest.max_context < manifest.context:
        raise RecordError(
            f"manifest field 'max_context' is {manifest.max_context}; it must be at least the context, {manifest.context}"
        )
    # Ids are i32, and each has an embedding of at least one byte; a weights file has at least a page.
    limit = min(max(manifest.files[WEIGHTS].size, 4096) if WEIGHTS in manifest.files else 2**31, 2**31 - 1)
    if manifest.vocab > limit:
        raise RecordError(
            f"manifest field 'vocab' is {manifest.vocab}; it must be at most {limit}, because weights.irpa "
            "has space for no more tokens"
        )
    _check_states(manifest)
    _check_facts("source", manifest.source)
    _check_facts("compile", manifest.compile)
    _check_functions(manifest)
    for name, file in manifest.files.items():
        if name not in FILES and name not in map(module_name, manifest.functions):
            raise RecordError(
                f"manifest field 'files' lists {short(name)}, which is neither a standard file nor the module of a function"
            )
        if file.size < 0:
            raise RecordError(f"manifest field 'files.{name}.size' is {file.size}; it must be at least 0")
        if not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise RecordError(
                f"manifest field 'files.{name}.sha256' is {short(repr(file.sha256))}, not 64 lowercase hex digits"
            )
        if file.size > _MAX_BYTES.get(name, file.size):
            raise RecordError(f"manifest field 'files.{name}.size' is {file.size}; the limit is {_MAX_BYTES[name]} bytes")
    if manifest.encoder:
        _check_encoder(manifest, manifest.encoder)
    tokens = (manifest.tokens.bos, *manifest.tokens.eos, *manifest.tokens.fim.values())
    if bad := [t for t in tokens if t is not None and not 0 <= t < manifest.vocab]:
        raise RecordError(f"manifest field 'tokens' has id {bad[0]}, but the vocabulary has {manifest.vocab} tokens")


def _check_functions(manifest: Manifest) -> None:
    if unknown := [f.role for f in manifest.functions if f.role not in ROLES]:
        raise RecordError(f"manifest field 'functions' has the unknown role {short(unknown[0])}; use one of {', '.join(ROLES)}")
    widths = {role: [f.width for f in manifest.functions if f.role == role and not f.is_long] for role in ROLES}
    multi = [w for role in ("prefill", "verify", "embed", "encode") for w in widths[role]]
    if bad := [w for w in multi if not 2 <= w <= manifest.context]:
        raise RecordError(
            f"manifest field 'functions' has a width of {bad[0]} tokens; it must be 2 to {manifest.context}, the context"
        )
    kind, roles = ("an embedding", {"encode"}) if manifest.encoder else ("a generating", set(ROLES) - {"encode"})
    if alien := [role for role, found in widths.items() if found and role not in roles]:
        allowed = ", ".join(sorted(roles))
        raise RecordError(f"manifest field 'functions' has the role {alien[0]}; {kind} model can have only {allowed}")
    if manifest.encoder and not widths["encode"]:
        raise RecordError("manifest field 'functions' has no function with the role encode; an embedding model needs one")
    if not manifest.encoder and widths["decode"] != [1]:
        found = widths["decode"]
        raise RecordError(
            f"manifest field 'functions' lists decode functions of widths {found} (tokens a call); it must list one, of width 1"
        )
    if wrong := [role for role, found in widths.items() if len(set(found)) != len(found) or min(found, default=2) < 1]:
        found = widths[wrong[0]]
        raise RecordError(
            f"manifest field 'functions' has {wrong[0]} functions of widths {found}; use distinct widths of at least 1"
        )
    original = manifest.original_context
    if original is not None and not 1 <= original < manifest.max_context:
        raise RecordError(
            f"manifest field 'original_context' is {original}; it must be at least 1 and below max_context, "
            f"{manifest.max_context}"
        )
    if manifest.functions != functions(widths, original is not None):
        raise RecordError(f"manifest field 'functions' is not in the order {', '.join(ROLES)}, then those with is_long")


def _check_encoder(manifest: Manifest, encoder: EncoderConfig) -> None:
    if encoder.default_prompt is not None and encoder.default_prompt not in encoder.prompts:
        raise RecordError(
            f"manifest field 'encoder.default_prompt' is {encoder.default_prompt!r}; use a key of encoder.prompts"
        )
    limit = max(manifest.widths("encode")) if encoder.single_call else manifest.context
    if not 1 <= encoder.max_tokens <= limit:
        raise RecordError(f"manifest field 'encoder.max_tokens' is {encoder.max_tokens}; the functions support 1 to {limit}")


def _check_states(manifest: Manifest) -> None:
    names = [state.name for state in manifest.states]
    if len(set(names)) != len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise RecordError(f"manifest field 'states' has two states named {short(duplicate)}")
    widest = max([1, *(f.width for f in manifest.functions if f.role != "batch")])
    for state in manifest.states:
        state_field = f"manifest field 'states.{state.name}'"
        if problem := state.problem():
            raise RecordError(f"manifest field 'states.{state.name}': {problem}")
        if state.kind == "positional" and state.shape[1] != manifest.max_context:
            raise RecordError(
                f"{state_field} has {state.shape[1]} positions; it must have {manifest.max_context} (max_context)"
            )
        if state.kind == "window" and state.shape[1] < (needed := ring_rows(state.window, widest)):
            raise RecordError(
                f"{state_field} has {state.shape[1]} rows; it must have at least {needed} for its window and "
                "the widest function"
            )
