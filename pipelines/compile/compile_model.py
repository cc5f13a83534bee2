"""Compile a checkpoint to a bundle: open, build, lower, compile, pack."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import castiron
from castiron.emitter.graph.ir import Module
from castiron.emitter.graph.printer import print_module, print_operations
from castiron.emitter.layers import operations
from castiron.emitter.layers.step import ModelModule
from castiron.emitter.models import read_config
from castiron.pipelines.checkpoints.adapter import adapter_sha256
from castiron.pipelines.checkpoints.checkpoint import check_tokenizer, validate
from castiron.pipelines.checkpoints.hf.encoding_files import MODULES
from castiron.pipelines.checkpoints.open_checkpoint import checkpoint_sha256, find_checkpoint
from castiron.pipelines.compile.build_model import build_model, build_module, open_source
from castiron.pipelines.compile.bundle_manifest import manifest_of
from castiron.pipelines.compile.calibration import calibrate, text_sha256
from castiron.pipelines.compile.compile_options import Options, Progress
from castiron.pipelines.compile.gpu_probes import decode_on_cpu, make_probes
from castiron.pipelines.compile.tile_store import TileFields, tuned_tiles
from castiron.pipelines.compile.weight_codecs import write_parameters
from castiron.pipelines.files import BUNDLE_SOURCES, require_free_space, sources_hash
from castiron.pipelines.locate import parts_of
from castiron.vmfb.bundle.bundle import Bundle, BundleWriter, open_bundle
from castiron.vmfb.bundle.manifest import (
    DEVICE,
    MODEL,
    TABLE,
    TOKENIZER,
    WEIGHTS,
    Accuracy,
    BundleError,
    KnownAnswer,
    Manifest,
    module_name,
)
from castiron.vmfb.bundle.token_table import table_of
from castiron.vmfb.compiler.iree_compile import (
    NOT_INSTALLED,
    CompileError,
    compile_flags,
    compile_modules,
    compiler_version,
    is_installed,
)
from castiron.vmfb.file_errors import naming
from castiron.vmfb.targets import Target, missing_features, resolve

# A function of (bundle, progress) that measures the bundle's accuracy, such as `own_accuracy`; progress takes (done, total).
Evaluate = Callable[[Bundle, Callable[[int, int], None]], Accuracy | None]

# Files that `castiron compile --save-temps` writes. The compiled module has the name TEXT in its debug information.
LAYERS, TEXT, COMMANDS = "layers.mlir", "module.mlir", "commands.sh"


@dataclass(frozen=True)
class CompileReport:
    """How `compile_model` made a bundle; seconds: by stage; up_to_date: nothing was compiled."""

    bundle: Path
    up_to_date: bool
    seconds: dict[str, float]
    manifest: Manifest


def compile_model(
    model: str | Path,
    out: Path,
    options: Options = Options(),
    progress: Progress | None = None,
    tiles: TileFields | None = None,
    keep: Path | None = None,
    evaluate: Evaluate | None = None,
    packed: Bundle | None = None,
    announce: Callable[[], None] = lambda: None,
) -> CompileReport:
    """Compile a model into the bundle directory `out`, unless it is up to date and `keep` is None.

    Without an installed compiler, the version that made the bundle counts as the same input. After
    an error, no new files are left.

    tiles: by name of a matmul, instead of the results of `castiron tune`.
    keep: folder for the generated MLIR and a script that compiles it.
    evaluate: measures the accuracy of a bundle with numerics "fast" that this machine can run.
    packed: another bundle, with which equal weights are shared by a hard link.
    announce: called before the compilation starts.
    """
    report = progress or (lambda stage, done: None)
    seconds: dict[str, float] = {}
    target = resolve(options.target)
    path = find_checkpoint(model, progress)
    tiles = tuned_tiles(options, target) if tiles is None else tiles
    before = existing(out)
    compiler = before.manifest.versions.iree if before and not is_installed() else compiler_version()
    key = _key(path, options, target, compiler)
    facts = before.manifest.compile if before else {}
    # The key does not include tiles, so compare the tiles of the bundle's matmuls separately.
    used = {name: tiles[name] for name in facts.get("matmuls", ()) if name in tiles}
    if before is not None and facts.get("key") == key and facts.get("tuned") == used and keep is None:
        return CompileReport(before.path, True, {}, before.manifest)
    if not is_installed():
        raise CompileError(f"{model} has changed since {out} was compiled, and {NOT_INSTALLED}")
    checkpoint = open_source(path, options, progress)
    announce()

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        report(name, 0.0)
        start = time.perf_counter()
        yield
        seconds[name] = round(time.perf_counter() - start, 3)
        report(name, 1.0)

    vocab = read_config(checkpoint.config).vocab
    with stage("emit"):
        module = build_module(checkpoint, options, target, tiles)
        text = print_module(module)
    weights_key = _weights_key(path, options, target, module, compiler)
    same = next((b for b in (before, packed) if b and b.manifest.compile.get("weights_key") == weights_key), None)
    if same is None:
        require_free_space(out, sum(param.type.nbytes for param in module.params.values()), f"the bundle {out}")
    if keep is not None:
        with naming(keep):
            _write_sources(keep, build_model(checkpoint, options), text, compile_flags(target, options.iree_flags), out)
    probes = make_probes(checkpoint, options) if target.driver else None
    cancelled, compiling = threading.Event(), threading.Event()

    def report_pack(name: str, done: float) -> None:
        if cancelled.is_set():
            raise CancelledError
        # While modules are compiled, show only the progress of the compilation.
        if not compiling.is_set():
            report(name, done)

    def pack(writer: BundleWriter) -> str:
        validate(checkpoint, vocab)
        if checkpoint.chat_template:
            writer.write("chat_template.jinja", checkpoint.chat_template)
        if same:
            writer.link(same, WEIGHTS)
            return same.manifest.files[WEIGHTS].sha256
        importance = calibrate(checkpoint, options, report_pack)
        progress = lambda done: report_pack("pack", done)
        more = probes.parameters if probes else {}
        return write_parameters(writer.path(WEIGHTS), checkpoint, module, importance, progress, more)

    def write_tokenizer(writer: BundleWriter) -> None:
        if (tokenizer := check_tokenizer(checkpoint, vocab)) is not None:
            writer.write(TOKENIZER, tokenizer)
            if table := table_of(checkpoint.tokenizer or {}):
                writer.write(TABLE, table)

    with BundleWriter(out) as writer:
        texts = module_texts(module) | ({DEVICE: probes.text} if probes else {})
        # A child process checks the tokenizer, and hashing releases the GIL.
        works = (lambda: write_tokenizer(writer), lambda: pack(writer), lambda: checkpoint_sha256(checkpoint.path))
        with _in_threads(works, cancelled) as futures:
            compiling.set()
            with stage("compile"):
                result = compile_modules(texts, target, writer.directory, extra_flags=options.iree_flags, cancelled=cancelled)
            compiling.clear()
            with stage("pack"):
                _, weights, source_sha256 = (future.result() for future in futures)
        compile_info = {
            "key": key,
            "weights_key": weights_key,
            "seconds": seconds,
            "iree_compile_seconds": result.seconds,
            "flags": list(result.flags),
            "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        }
        manifest = manifest_of(model, checkpoint, source_sha256, options, target, module, tiles, compile_info)
        hashes = {WEIGHTS: weights}
        if probes:
            with stage("known answer"):
                importance = calibrate(checkpoint, options, report_pack)
                answer = KnownAnswer(probes.expected, decode_on_cpu(checkpoint, options, importance))
            manifest = replace(manifest, known_answer=answer)
        if evaluate and options.numerics == "fast" and not manifest.encoder and not missing_features(target):
            with stage("evaluate"):
                accuracy = evaluate(writer.staged(manifest, hashes), lambda done, total: report("evaluate", done / total))
            manifest = replace(manifest, accuracy=accuracy)
        bundle = writer.commit(manifest, hashes)
    return CompileReport(bundle.path, False, seconds, bundle.manifest)


@contextmanager
def _in_threads(works: Sequence[Callable[[], Any]], cancelled: threading.Event) -> Iterator[list[Future]]:
    """Run functions in threads during a `with` block; set `cancelled` if one or the block fails."""
    with ThreadPoolExecutor(len(works)) as pool:
        futures = [pool.submit(work) for work in works]
        for future in futures:
            future.add_done_callback(lambda done: cancelled.set() if done.exception() else None)
        try:
            yield futures
        except BaseException:
            cancelled.set()
            causes = [future.exception() for future in futures if future.done()]
            # The body and other threads fail because a thread did.
            if cause := next((cause for cause in causes if cause and not isinstance(cause, CancelledError)), None):
                raise cause from None
            raise


def module_texts(module: Module) -> dict[str, str]:
    """Return the MLIR text of a bundle's modules by file name; the first is `model.vmfb`."""
    by_file: dict[str, list[str]] = {}
    for function in module.functions.values():
        assert function.entry is not None, "a model's function has a role"
        by_file.setdefault(module_name(function.entry), []).append(function.name)
    return {name if at else MODEL: print_module(module.part(*part)) for at, (name, part) in enumerate(by_file.items())}


def existing(out: Path) -> Bundle | None:
    try:
        return open_bundle(out, run=False)
    except BundleError:
        return None


def _weights_key(path: Path, options: Options, target: Target, module: Module, compiler: str) -> str:
    types = sorted((param.name, str(param.type)) for param in module.params.values())
    of_weights = replace(options, context=None, prefill=(), batch=(), verify_widths=(), embed=(), iree_flags=())
    return hashlib.sha256(json.dumps([_key(path, of_weights, target, compiler), types]).encode()).hexdigest()


def _key(path: Path, options: Options, target: Target, compiler: str) -> str:
    """Return a hash of everything that determines a bundle, except the tiles of its matmuls."""
    path = path.resolve()
    # Chat templates for tools, and the layers after an encoder's pooling, are in separate folders.
    inner = "*/*" if (path / MODULES).exists() else "additional_chat_templates/*"
    inputs_read = [*path.iterdir(), *path.glob(inner)] if path.is_dir() else []
    inputs_read = inputs_read or [*map(path.with_name, parts_of(path.name))]
    weights = adapter_sha256(Path(options.adapter)) if options.adapter else None
    if options.adapter:  # its tokenizer and template
        inputs_read += Path(options.adapter).resolve().iterdir()
    files = sorted(p for p in inputs_read if p.is_file())  # content is not read
    stamps = [(os.path.relpath(p, path), p.stat().st_size, p.stat().st_mtime_ns) for p in files]
    chosen = asdict(options) | {"threads": options.threads_or_cores}
    del chosen["tuned"]  # compared as tiles
    inputs = [stamps, chosen, asdict(target), castiron.__version__, compiler]
    if weights:
        inputs.append(weights)
    if options.calibrate:
        inputs.append(text_sha256(options.calibrate))
    inputs.append(sources_hash(*BUNDLE_SOURCES))
    return hashlib.sha256(json.dumps(inputs, default=list).encode()).hexdigest()


def _write_sources(folder: Path, model: ModelModule, text: str, flags: tuple[str, ...], bundle: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LAYERS).write_text(print_operations(model, operations.LAYERS), encoding="utf-8")
    (folder / TEXT).write_text(text, encoding="utf-8")
    compile_ = shlex.join(["iree-compile", TEXT, *flags, "-o", "model.vmfb"])
    replace_ = shlex.join(["castiron", "compile", str(Path(bundle).resolve()), "--module", "model.vmfb"])
    (folder / COMMANDS).write_text(
        f"#!/bin/sh -e\n# {LAYERS} has layer operations, {TEXT} what they are lowered to. The compiler writes its phases\n"
        f'# with --dump-compilation-phases-to=phases.\ncd "$(dirname "$0")"\n{compile_}\n{replace_}\n',
        encoding="utf-8",
    )
    (folder / COMMANDS).chmod(0o755)
