"""A checkpoint into a bundle: read, build, lower, compile, pack; and nothing left behind when a step fails."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

import castiron
from castiron.emitter.caches import CACHES
from castiron.emitter.ir import Module, Param
from castiron.emitter.kernels.writing.isa import ISAS
from castiron.emitter.lowering import LOWERINGS, NUMERICS, lower
from castiron.emitter.models import build, family
from castiron.emitter.printer import print_module
from castiron.emitter.quantise import convert
from castiron.emitter.shown import shown_list
from castiron.emitter.step import ModelModule
from castiron.emitter.types import EmitError
from castiron.pipelines.casting import calibrate
from castiron.pipelines.casting.encoders import EncoderSizes, encoder_facts, encoder_sizes
from castiron.pipelines.casting.kept import write_kept
from castiron.pipelines.casting.module_facts import arithmetic_of, entry_point, products_of, work_of
from castiron.pipelines.casting.soundness import sound
from castiron.pipelines.casting.sources import sources_hash
from castiron.pipelines.casting.weights import QUANTISED, WEIGHTS, codecs_of
from castiron.pipelines.checkpoints import Checkpoint, CheckpointError, missing_and_left_over, open_checkpoint
from castiron.pipelines.checkpoints.adapter import adapter_sha256, merge, open_adapter
from castiron.pipelines.checkpoints.identity import checkpoint_sha256
from castiron.pipelines.generation.tool_forms import form_of
from castiron.pipelines.generation.vocabulary import Vocabulary
from castiron.pipelines.hub_name import source_of
from castiron.pipelines.places import as_text, model_name
from castiron.pipelines.progress import clock
from castiron.pipelines.space import need_room
from castiron.pipelines.tuning import store
from castiron.vmfb.bundle import Bundle, BundleWriter, open_bundle
from castiron.vmfb.compiler import compile_flags, compile_mlir, compiler_version, expected_seconds
from castiron.vmfb.cpu import physical_cores
from castiron.vmfb.disk import naming
from castiron.vmfb.manifest import TOKENIZER, VOCABULARY, Accuracy, BundleError, Manifest, Tokens, Versions
from castiron.vmfb.states import State
from castiron.vmfb.targets import Target, missing_features, resolve
from castiron.vmfb.weights import write_irpa

# Tokens a prefill call takes; a chunk runs at the smallest width that holds it.
PREFILL_WIDTHS = (8, 32, 128)
_EVEN: Mapping[str, np.ndarray] = MappingProxyType({})
DEFAULT_CONTEXT = 8192
# For a machine other than this one.
DEFAULT_THREADS = 2

Progress = Callable[[str, float], None]
# Of a bundle, and a function to be told (done, in all): `likelihood.own_accuracy`.
Evaluate = Callable[[Bundle, Callable[[int, int], None]], Accuracy | None]


@dataclass(frozen=True)
class Options:
    """What `castiron compile` can be told.

    context: positions of the cache; None takes the model's limit, at most 8192. weights: "native" keeps the checkpoint's
    own types, "f32", "bf16" and "f16" convert every matrix, the others quantise (`weights.codecs_of`). adapter: a directory
    of PEFT's, merged into the weights before that. calibrate: a text whose activations say how much each column of a weight
    counts when it is quantised. cache: how keys and values of positions are stored, "f32", "f16" or "q8_0";
    other states are f32. lowering: "kernels" or "portable". batch: numbers of sequences that are decoded at once. speculate:
    numbers of proposed tokens that are checked at once. embed: widths of the functions that give hidden states, for
    embeddings of texts; of a model that encodes texts, which has no others, of the functions that do. threads: how many will
    run the bundle, by which kernels share out their work; None takes one a physical core. tuned: what `castiron tune` found
    on this machine is used, for the target "host". ignore_keys: keys of the checkpoint's config, or of its GGUF metadata,
    that are left out. iree_flags: flags for iree-compile after castiron's own, each one word.
    """

    context: int | None = None
    weights: str = "native"
    adapter: str | None = None
    calibrate: str | None = None
    numerics: str = "exact"
    cache: str = "f32"
    lowering: str = "kernels"
    target: str = "host"
    batch: tuple[int, ...] = (4, 8)
    speculate: tuple[int, ...] = (4, 8)
    embed: tuple[int, ...] = ()
    threads: int | None = None
    tuned: bool = True
    ignore_keys: tuple[str, ...] = ()
    iree_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        known = {"weights": WEIGHTS, "numerics": NUMERICS, "cache": CACHES, "lowering": LOWERINGS}
        for name, allowed in known.items():
            if getattr(self, name) not in allowed:
                raise EmitError(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
        for name, most in (("batch", 64), ("speculate", 64), ("embed", 512)):
            sizes = getattr(self, name)
            if len(set(sizes)) != len(sizes) or min(sizes, default=2) < 2 or max(sizes, default=0) > most:
                raise EmitError(f"{name} takes distinct sizes from 2 to {most}, not {', '.join(map(str, sizes))}")
        if self.calibrate and self.weights not in QUANTISED:
            raise EmitError(f"a text calibrates weights that are quantised, and weights is {self.weights!r}: quantise them")
        if self.threads is not None and self.threads < 1:
            raise EmitError(f"threads is {self.threads}; it must be at least 1")
        if bad := [flag for flag in self.iree_flags if not flag.startswith("--")]:
            raise EmitError(f"{bad[0]!r} is not a flag of iree-compile; give it whole, as --iree-flag=--iree-opt-level=O2")

    @property
    def threads_or_cores(self) -> int:
        return self.threads or (physical_cores() if self.target == "host" else DEFAULT_THREADS)


@dataclass(frozen=True)
class CompileReport:
    """Where the bundle is, whether it was there already, seconds by stage, bytes of its files, elements of its caches, and its
    manifest's accuracy: how far numerics that round are from exact ones, None where that was not measured. left_out: as of the
    checkpoint."""

    bundle: Path
    up_to_date: bool
    seconds: dict[str, float]
    files: dict[str, int]
    cache: str
    accuracy: Accuracy | None = None
    left_out: dict[str, int] = field(default_factory=dict)


def context_of(config: dict, asked: int | None) -> int:
    """The context to compile for: what was asked, or the model's limit, at most 8192; `build` refuses one past it."""
    return asked if asked is not None else min(family(config).Config.read(config).max_positions, DEFAULT_CONTEXT)


def encoder_sizes_of(checkpoint: Checkpoint, options: Options) -> EncoderSizes | None:
    """What these options compile an encoder for, None for a model that generates."""
    return encoder_sizes(checkpoint, context_of(checkpoint.config, options.context), options.embed)


def open_source(model: str | Path, options: Options, progress: Progress | None = None) -> Checkpoint:
    """The checkpoint of `model` as these options change it: without the keys that they ignore, with their adapter merged."""
    checkpoint = open_checkpoint(model, progress, options.ignore_keys)
    return merge(checkpoint, open_adapter(Path(options.adapter))) if options.adapter else checkpoint


def importance_of(checkpoint: Checkpoint, options: Options, progress: Progress) -> Mapping[str, np.ndarray]:
    """How much the columns of each weight count by the options' text (`calibrate.importance_of`); nothing without one."""
    if not options.calibrate:
        return _EVEN
    if checkpoint.encoding:
        raise CheckpointError(
            f"{checkpoint.path} encodes texts, and castiron calibrates models that generate: leave --calibrate out"
        )
    identity = [checkpoint_sha256(checkpoint.path)] + ([adapter_sha256(Path(options.adapter))] if options.adapter else [])
    told = lambda context, width: Options(context=context, batch=(), speculate=(), embed=(width,))
    run = calibrate.Run(
        lambda context, width: build_model(checkpoint, told(context, width), ()), lambda p: packed_parameter(checkpoint, p)
    )
    return calibrate.importance_of(checkpoint, json.dumps(identity), options.calibrate, run, progress)


def build_model(checkpoint: Checkpoint, options: Options, widths: tuple[int, ...] = PREFILL_WIDTHS) -> ModelModule:
    """The model as layer operations, after every tensor it calls for was found in the checkpoint with its shape.

    `widths` are those of the prefill functions; wider ones than the context are left out.

    Raises EmitError for a config that is not understood and CheckpointError listing every tensor that is missing, of
    another shape, or left over.
    """

    codecs = codecs_of(checkpoint, options.weights)
    context = context_of(checkpoint.config, options.context)
    widths = [width for width in widths if width <= context]
    verify = [width for width in options.speculate if width <= context]
    embed = [width for width in options.embed if width <= context]
    codec = lambda name: codecs.get(name, "f32")
    if sizes := encoder_sizes_of(checkpoint, options):
        pooling = checkpoint.encoding.pooling if checkpoint.encoding else None
        config = checkpoint.config
        module = build(config, codec, sizes.context, (), embeds=sizes.widths, cache=options.cache, pooling=pooling)
    else:
        module = build(checkpoint.config, codec, context, widths, verify, options.batch, embed, options.cache)
    required = {w.name: w.shape for w in module.weights.values() if w.values is None}
    problems = missing_and_left_over(required, checkpoint)
    if problems:
        # Some of either kind: names that nobody asks for often tell why others are missing.
        kinds = [[problem for problem in problems if problem.endswith(" is left over") == left] for left in (False, True)]
        most = 180 // sum(map(bool, kinds))
        told = "; ".join(shown_list(kind, "; ", most) for kind in kinds if kind)
        raise CheckpointError(f"{checkpoint.path} does not hold what its config calls for: {told}")
    return module


def build_module(
    checkpoint: Checkpoint,
    options: Options,
    target: Target | None = None,
    tiles: store.FieldsByProduct = MappingProxyType({}),
) -> Module:
    """The lowered and verified module; `tiles` as `tuned_tiles` gives them."""
    isa, threads = (target or resolve(options.target)).isa, options.threads_or_cores
    model = build_model(checkpoint, options)
    tiled = lambda product: store.choose(product, tiles, ISAS[isa], threads)
    return lower(model, options.lowering, isa, threads, tiled, options.numerics)


def tuned_tiles(options: Options, target: Target) -> store.FieldsByProduct:
    """The tiles that tuning found for what these options compile; StoreError if they cannot be read."""
    if not options.tuned or options.target != "host" or options.lowering != "kernels":
        return {}
    return store.tiles_of(store.key_of(target, options.threads_or_cores))


def stored(checkpoint: Checkpoint, name: str, codec: str, importance: Mapping[str, np.ndarray] = _EVEN) -> np.ndarray:
    """The raw bytes of a tensor in `codec`, converted through f32 if the checkpoint has another. importance: by
    tensor, the weight of an error in each column [in], where quantising should not count them alike. CheckpointError if the
    codec has no place for the tensor's numbers."""
    tensor = checkpoint.tensors[name]
    if tensor.codec == codec:
        return tensor.data
    try:
        return convert(tensor.codec, tensor.data, codec, importance.get(name))
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.path}: {name}: {error}") from None


def packed_parameter(checkpoint: Checkpoint, param: Param, importance: Mapping[str, np.ndarray] = _EVEN) -> np.ndarray:
    """The array of one parameter, as the compiled functions read it; importance as `stored` takes it."""
    # Parts of one tensor ask for it one by one, and quantising it takes a while.
    read = {asked: stored(checkpoint, *asked, importance) for asked in dict.fromkeys(param.source.tensors)}
    return np.ascontiguousarray(param.source.pack(*(read[asked] for asked in param.source.tensors)))


def compile_model(
    model: str | Path,
    out: Path,
    options: Options = Options(),
    progress: Progress | None = None,
    tiles: store.FieldsByProduct | None = None,
    keep: Path | None = None,
    evaluate: Evaluate | None = None,
) -> CompileReport:
    """Compile a GGUF file, an HF directory, a catalogue name or a name on the hub into the bundle directory `out`.

    A bundle that the same inputs made is left as it is. `progress(stage, done)` gets the share done of each stage.
    `tiles` are used instead of `tuned_tiles`. `keep` is a folder for the MLIR and the commands (`kept.write_kept`), which
    are written for a bundle that is up to date too. `evaluate` gets a bundle whose numerics round, where this machine can
    run it, and finds the manifest's accuracy. Raises CheckpointError, EmitError, CompileError, BundleError or
    StoreError, each one sentence; then nothing is written.
    """
    told = progress or (lambda stage, done: None)
    seconds: dict[str, float] = {}
    target = resolve(options.target)
    checkpoint = open_source(model, options, progress)
    tiles = tuned_tiles(options, target) if tiles is None else tiles
    key = _key(checkpoint, options, target)
    before = existing(out)
    up_to_date = before and before.manifest.compile.get("key") == key and _has_tiles(before, tiles)
    if up_to_date and keep is None:
        return _report(before, True, {})

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        told(name, 0.0)
        start = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - start, 3)
        told(name, 1.0)

    vocab = vocab_of(checkpoint.config)
    with stage("emit"), nullcontext() if up_to_date else sound(checkpoint, vocab):
        module = build_module(checkpoint, options, target, tiles)
        text = print_module(module)
    if not up_to_date:
        need_room(out, sum(param.type.nbytes for param in module.params.values()), f"the bundle {out}")
    importance = _EVEN
    if options.calibrate and not up_to_date:
        with stage("calibrate"):
            importance = importance_of(checkpoint, options, told)
    if keep is not None:
        with naming(keep):
            write_kept(Path(keep), build_model(checkpoint, options), text, compile_flags(target, options.iree_flags), out)
    if up_to_date:
        return _report(before, True, {})
    with BundleWriter(out) as writer:
        with stage("compile"), clock(lambda done: told("compile", done), lambda: expected_seconds(text)):
            result = compile_mlir(text, target, writer.path("model.vmfb"), extra_flags=options.iree_flags)
        with stage("pack"):
            entries = [
                (p.name, lambda p=p: packed_parameter(checkpoint, p, importance), (p.type.shape, p.type.dtype.numpy))
                for p in sorted(module.params.values(), key=lambda p: p.name)
            ]
            weights = write_irpa(writer.path("weights.irpa"), entries, lambda done, total: told("pack", done / total))
        if checkpoint.tokenizer is not None:
            tokenizer = json.dumps(checkpoint.tokenizer, ensure_ascii=False)
            writer.write(TOKENIZER, tokenizer)
            # What an encoder answers is no text.
            if not checkpoint.encoding and (vocabulary := vocabulary_of(tokenizer, vocab)):
                writer.write(VOCABULARY, bytes(vocabulary))
        if checkpoint.chat_template:
            writer.write("chat_template.jinja", checkpoint.chat_template)
        facts = {"key": key, "seconds": seconds, "iree_compile_seconds": result.seconds, "flags": list(result.flags)}
        sizes = encoder_sizes_of(checkpoint, options)
        context = sizes.context if sizes else context_of(checkpoint.config, options.context)
        facts["work"] = {name: work_of(function, context) for name, function in module.functions.items()}
        products = products_of(module)
        facts["threads"], facts["products"] = options.threads_or_cores, [product.name for product in products]
        facts["tuned"] = {name: tiles[name] for name in facts["products"] if name in tiles}
        facts["arithmetic"] = arithmetic_of(products, target)
        facts["text_sha256"] = hashlib.sha256(text.encode()).hexdigest()
        manifest, hashes = _manifest(model, checkpoint, options, target, module, facts), {"weights.irpa": weights}
        if evaluate and options.numerics == "fast" and not manifest.encoder and not missing_features(target):
            with stage("evaluate"):
                accuracy = evaluate(writer.staged(manifest, hashes), lambda done, total: told("evaluate", done / total))
            manifest = replace(manifest, accuracy=accuracy)
        bundle = writer.commit(manifest, hashes)
    return _report(bundle, False, seconds)


def vocabulary_of(tokenizer: str, size: int) -> Vocabulary | None:
    """Of a tokenizer.json, for a model of `size` tokens; None for one that cannot be read, which loading it tells."""
    from tokenizers import Tokenizer

    try:
        return Vocabulary.of(Tokenizer.from_str(tokenizer), size)
    except Exception:  # tokenizers raises Exception itself
        return None


def vocab_of(config: dict) -> int:
    """How many tokens a model knows."""
    return family(config).Config.read(config).vocab


def _manifest(model, checkpoint: Checkpoint, options: Options, target: Target, module: Module, facts) -> Manifest:
    first, config, sizes = next(iter(module.functions.values())), checkpoint.config, encoder_sizes_of(checkpoint, options)
    source = {
        "model": as_text(model), "path": as_text(os.path.abspath(checkpoint.path)), "format": checkpoint.format,
        "sha256": checkpoint_sha256(checkpoint.path), "ignored_keys": list(options.ignore_keys),
        "left_out": dict(checkpoint.left_out),
    }  # fmt: skip
    if hub := source_of(checkpoint.path):
        source["hub"] = hub
    if options.adapter:
        place = Path(options.adapter)
        path, rank = as_text(os.path.abspath(place)), open_adapter(place).rank
        source["adapter"] = {"path": path, "sha256": adapter_sha256(place), "rank": rank}
    if options.calibrate:
        text = options.calibrate
        source["calibrated"] = {"path": as_text(os.path.abspath(text)), "sha256": calibrate.text_sha256(text)}
    return Manifest(
        name=model_name(checkpoint.path),
        config=config,
        vocab=vocab_of(config),
        context=sizes.context if sizes else context_of(config, options.context),
        states=tuple(State(s.name, s.shape, s.dtype.name, s.kind, s.window) for s in first.states),
        functions=tuple(entry_point(function) for function in module.functions.values()),
        hidden=next((f.outputs[0].type.shape[-1] for f in module.functions.values() if f.role in ("embed", "encode")), 0),
        encoder=encoder_facts(checkpoint.encoding, sizes) if checkpoint.encoding and sizes else None,
        numerics=options.numerics,
        lowering=options.lowering,
        weights=options.weights,
        codecs=dict(sorted(Counter(codecs_of(checkpoint, options.weights).values()).items())),
        target=target,
        versions=Versions(castiron.__version__, compiler_version()),
        tokens=Tokens(checkpoint.bos_token_id, tuple(checkpoint.eos_token_ids)),
        generation=checkpoint.generation_config,
        tool_form=form_of(checkpoint.chat_template),
        source=source,
        compile=facts,
    )


def existing(out: Path) -> Bundle | None:
    """The bundle that stands there, if it can be read."""
    try:
        return open_bundle(out, run=False)
    except BundleError:
        return None


def _has_tiles(bundle: Bundle, tiles: store.FieldsByProduct) -> bool:
    """Whether the bundle was compiled with these tiles, of which other models' may be among them."""
    facts = bundle.manifest.compile
    return facts.get("tuned") == {name: tiles[name] for name in facts.get("products", ()) if name in tiles}


def _report(bundle: Bundle, up_to_date: bool, seconds: dict[str, float]) -> CompileReport:
    sizes = {name: file.size for name, file in bundle.manifest.files.items()}
    manifest = bundle.manifest
    left_out = manifest.source.get("left_out", {})
    return CompileReport(bundle.path, up_to_date, seconds, sizes, manifest.cache, manifest.accuracy, left_out)


def _key(checkpoint: Checkpoint, options: Options, target: Target) -> str:
    """What a bundle depends on besides its tiles: the checkpoint's files, the options, the target, the compiler and
    castiron itself."""
    path = checkpoint.path.resolve()
    # What an encoder has after pooling lies in folders of its own.
    own = [*path.iterdir(), *(path.glob("*/*") if checkpoint.encoding else ())] if path.is_dir() else [path]
    files = sorted(p for p in own if p.is_file())
    stamps = [(str(p.relative_to(path)), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    told = asdict(options) | {"threads": options.threads_or_cores}
    # Whether there were tuned tiles to use is seen from those that were.
    del told["tuned"]
    facts = [stamps, told, asdict(target), castiron.__version__, compiler_version()]
    if options.adapter:
        facts.append(adapter_sha256(Path(options.adapter)))
    if options.calibrate:
        facts.append(calibrate.text_sha256(options.calibrate))
    facts.append(sources_hash(__name__, family(checkpoint.config).__name__))
    return hashlib.sha256(json.dumps(facts, default=list).encode()).hexdigest()
