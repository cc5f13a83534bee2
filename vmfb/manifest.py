"""What a bundle says of itself: `manifest.json`, schema 4."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from castiron.vmfb.facts import check_facts
from castiron.vmfb.record import Json, RecordError, from_json, short, to_json
from castiron.vmfb.states import KINDS, State
from castiron.vmfb.targets import Target

SCHEMA = 4
# Of each role: the function's name, and its operands and first results as MLIR spells their types.
ROLES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "decode": ("decode_step", ("i32", "i32"), ("i32", "{V}xf32")),
    "prefill": ("prefill_{T}", ("{T}xi32", "i32", "i32"), ("i32", "{V}xf32")),
    "verify": ("verify_{T}", ("{T}xi32", "i32"), ("{T}xi32", "{T}x{V}xf32")),
    "batch": ("decode_batch_{T}", ("{T}xi32", "{T}xi32"), ("{T}xi32", "{T}x{V}xf32")),
    "embed": ("embed_{T}", ("{T}xi32", "i32", "i32"), ("{T}x{H}xf32",)),
    "encode": ("encode_{T}", ("{T}xi32", "i32", "i32"), ("{H}xf32",)),
}
MODEL, WEIGHTS, TOKENIZER, VOCABULARY, TEMPLATE, LOG, TEXT = (
    "model.vmfb", "weights.irpa", "tokenizer.json", "vocabulary.bin", "chat_template.jinja", "compile.log", "model.mlir",
)  # fmt: skip
# Every file that a bundle may hold besides the manifest, and whether it must.
FILES: dict[str, bool] = {
    MODEL: True,
    WEIGHTS: True,
    TOKENIZER: False,
    VOCABULARY: False,
    TEMPLATE: False,
    LOG: False,
    TEXT: False,
}
# In bytes, of what is read whole.
_LARGEST = dict.fromkeys((TOKENIZER, VOCABULARY, TEMPLATE), 100_000_000)
_HALF_OF_A_PAIR = re.compile(rb"\\u[dD][89a-fA-F]")
STATE_ITEM_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}


class BundleError(Exception):
    """A bundle that cannot be written, read or run here; one sentence with what to do."""


@dataclass(frozen=True)
class EntryPoint:
    """An exported function: its role, how many tokens one call takes, and its signature as MLIR spells the types: tokens and
    positions, then the states; argmax and logits, hidden states or a text's vector, then the states."""

    role: str
    name: str
    width: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def entry_points(
    states: Sequence[State], vocab: int, widths: Mapping[str, Sequence[int]], hidden: int = 0
) -> tuple[EntryPoint, ...]:
    """What every castiron module exports: by role, for each of its widths, a function over `states`. A batch of B holds the
    states of B sequences one after another."""

    def entry(role: str, width: int) -> EntryPoint:
        name, operands, results = ROLES[role]
        spelled = lambda words: tuple(word.format(T=width, V=vocab, H=hidden) for word in words)
        carried = tuple(state.type(width if role == "batch" else 1) for state in states)
        return EntryPoint(role, name.format(T=width), width, spelled(operands) + carried, spelled(results) + carried)

    return tuple(entry(role, width) for role in ROLES for width in widths.get(role, ()))


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
class Accuracy:
    """How far the functions of a bundle whose numerics round are from what `against` names: over `tokens` tokens of `text`, in
    chunks of `context` tokens, the Kullback-Leibler divergence of its distributions (mean with standard error, 99th percentile
    and maximum) and the share of equal most probable tokens with its error."""

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
class Encoder:
    """What makes a bundle one that encodes texts: a vector of `Manifest.hidden` numbers for each.

    pooling: mean, last or cls. dense: how many features each linear layer after it has. normalised: whether vectors have the
    length 1. whole: a text is one call, because tokens see those after them, else it comes in several. prompts: what is put
    before a text, by name; default_prompt: the one that is where none is named. max_tokens: of a text and its prompt,
    special tokens among them; what is longer is cut. lower_case: texts are. relevance: of a model that gives two texts one
    number, what makes a score of it, sigmoid or identity; None for vectors. types: whether tokens of the second of two texts
    have their ids plus the size of the vocabulary.
    """

    pooling: str
    normalised: bool
    whole: bool
    max_tokens: int
    dense: tuple[int, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    lower_case: bool = False
    relevance: str | None = None
    types: bool = False


@dataclass(frozen=True)
class File:
    """Size in bytes and sha256 in hex of one file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """`config`, `generation`, `source`, `speed` and `compile` are facts for people and pipelines; vmfb only carries them, with
    the types that `facts` knows, as it does `accuracy`, which is there where `numerics` are not exact and were compared.
    `hidden` is the length of a hidden state where a function gives them, that of a text's vector with an `encoder`, else 0;
    `tool_form` is how the chat template writes calls of functions, None where it does not. `codecs` counts the weights' tensors
    by codec. `files` is filled in by BundleWriter.
    """

    name: str
    config: dict
    vocab: int
    context: int
    states: tuple[State, ...]
    functions: tuple[EntryPoint, ...]
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
    encoder: Encoder | None = None
    tool_form: str | None = None
    schema: int = SCHEMA

    @property
    def cache(self) -> str:
        """How states are stored that are not recurrent, as `castiron compile --cache` has it; f32 where there are none.

        Of q8_0 a row is bytes, [groups, 4 + elements of a group]: a scale, f32, and the numbers.
        """
        dtype = next((state.dtype for state in self.states if state.kind != "recurrent"), "f32")
        return {"i8": "q8_0"}.get(dtype, dtype)

    @property
    def prefill_widths(self) -> tuple[int, ...]:
        """Ascending."""
        return self.widths("prefill")

    def widths(self, role: str) -> tuple[int, ...]:
        """Tokens that one call of each function of this role takes, ascending."""
        return tuple(sorted(function.width for function in self.functions if function.role == role))

    def function(self, role: str, width: int = 1) -> EntryPoint:
        """The function of that role and width; KeyError if there is none."""
        return {(f.role, f.width): f for f in self.functions}[role, width]


def dump(manifest: Manifest) -> bytes:
    """The bytes of `manifest.json`; keys in the order of the fields."""
    return (json.dumps(to_json(manifest), indent=2, ensure_ascii=False) + "\n").encode()


def parse(data: bytes, place: str) -> Manifest:
    """The manifest in `data`; BundleError, naming `place`, for what this version does not know or cannot be."""
    try:
        value = json.loads(data)
        if _HALF_OF_A_PAIR.search(data):
            # Such strings could be written nowhere.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{place} is not JSON ({short(str(error), 100)}); compile the bundle again") from None
    schema = value.get("schema") if isinstance(value, dict) else None
    if schema != SCHEMA or isinstance(schema, bool):
        raise BundleError(
            f"{place} has schema {short(repr(schema))} and this castiron reads {SCHEMA}; "
            "compile the bundle again, or use the castiron that made it"
        )
    try:
        manifest = from_json(Manifest, value)
        check(manifest)
    except RecordError as error:
        raise BundleError(f"{place}: {short(str(error), 200)}; compile the bundle again") from None
    return manifest


def check(manifest: Manifest) -> None:
    """RecordError unless the manifest's parts agree with each other."""
    least = {"vocab": 1, "context": 1, "hidden": int(bool(manifest.widths("embed") or manifest.encoder))}
    for name, smallest in least.items():
        if (value := getattr(manifest, name)) < smallest:
            raise RecordError(f"{name} is {value}, not a positive number")
    # i32 counts them, and each has a row of some bytes; a file of weights has a page at least.
    most = min(max(manifest.files[WEIGHTS].size, 4096) if WEIGHTS in manifest.files else 2**31, 2**31 - 1)
    if manifest.vocab > most:
        raise RecordError(f"vocab is {manifest.vocab}, and the weights have no more than {most} rows")
    _check_states(manifest)
    check_facts("source", manifest.source)
    check_facts("compile", manifest.compile)
    widths = {role: [f.width for f in manifest.functions if f.role == role] for role in ROLES}
    several = [w for role in ("prefill", "verify", "embed", "encode") for w in widths[role]]
    if bad := [w for w in several if not 2 <= w <= manifest.context]:
        raise RecordError(
            f"a prefill, verify, embed or encode function takes {bad[0]} tokens where the context is {manifest.context}"
        )
    known = entry_points(manifest.states, manifest.vocab, widths, manifest.hidden)
    twice = any(len(set(w)) != len(w) or min(w, default=2) < 1 for w in widths.values())
    kinds = {"encode"} if manifest.encoder else set(ROLES) - {"encode"}
    needed = bool(widths["encode"]) if manifest.encoder else widths["decode"] == [1]
    alien = any(found and role not in kinds for role, found in widths.items())
    if manifest.functions != known or twice or alien or not needed:
        raise RecordError("functions are not those of a castiron module with this vocabulary and these states")
    for name, file in manifest.files.items():
        if name not in FILES:
            raise RecordError(f"files.{name} is not a file that this version knows")
        if file.size < 0 or not re.fullmatch("[0-9a-f]{64}", file.sha256):
            raise RecordError(f"files.{name} has no proper size and sha256")
        if file.size > _LARGEST.get(name, file.size):
            raise RecordError(f"files.{name} has {file.size} bytes, and none has more than {_LARGEST[name]}")
    if manifest.encoder:
        _check_encoder(manifest, manifest.encoder)
    tokens = (manifest.tokens.bos, *manifest.tokens.eos)
    if bad := [t for t in tokens if t is not None and not 0 <= t < manifest.vocab]:
        raise RecordError(f"tokens names {bad[0]}, outside the vocabulary of {manifest.vocab}")


def _check_encoder(manifest: Manifest, encoder: Encoder) -> None:
    if encoder.default_prompt is not None and encoder.default_prompt not in encoder.prompts:
        raise RecordError(f"encoder.default_prompt is {encoder.default_prompt!r}, which encoder.prompts has not")
    most = max(manifest.widths("encode")) if encoder.whole else manifest.context
    if not 1 <= encoder.max_tokens <= most:
        raise RecordError(f"encoder.max_tokens is {encoder.max_tokens}, and its functions take {most}")


def _check_states(manifest: Manifest) -> None:
    names = [state.name for state in manifest.states]
    if len(set(names)) != len(names):
        raise RecordError("states have the same name twice")
    for state in manifest.states:
        place = f"states.{state.name}"
        if state.kind not in KINDS:
            raise RecordError(f"{place}.kind is {state.kind!r}, not one of {', '.join(KINDS)}")
        if state.dtype not in STATE_ITEM_BYTES:
            raise RecordError(f"{place}.dtype is {state.dtype!r}, not one of {', '.join(STATE_ITEM_BYTES)}")
        if min(state.shape, default=0) < 1 or len(state.shape) < 1 + (state.kind != "recurrent"):
            raise RecordError(f"{place}.shape is {list(state.shape)}, which no {state.kind} state has")
        if state.kind == "positional" and state.shape[1] != manifest.context:
            raise RecordError(f"{place} has {state.shape[1]} positions where the context is {manifest.context}")
        least = state.window + max(1, *(f.width for f in manifest.functions if f.role != "batch"))
        if (state.kind == "window") != (state.window > 0) or state.kind == "window" and state.shape[1] < least:
            raise RecordError(f"{place} has a window of {state.window}, which no {state.kind} state of {list(state.shape)} has")
