"""Open the bundle that a user names. A checkpoint is compiled at its first use, and cached."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.pipelines import locate
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.locate import HubName
from castiron.pipelines.terminal import Progress, print_message
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.manifest import BundleError
from castiron.vmfb.cache_folder import cache_folder, cache_root, claim, is_own

if TYPE_CHECKING:
    from castiron.pipelines.compile.compile_model import Evaluate
    from castiron.pipelines.compile.compile_options import Options
    from castiron.pipelines.compile.compile_options import Progress as Report
    from castiron.pipelines.text.generate import Vocabulary

_lock = threading.Lock()


def open_or_compile(
    model: str | Path | Bundle,
    options: Options | None = None,
    progress: Report | None = None,
    *,
    evaluate: Evaluate | None = None,
    full_check: bool = False,
    announce: bool = False,
    one_sequence: bool = False,
    draft: bool = False,
    target: str = "host",
) -> Bundle:
    """Return an open bundle for `model`; compile a checkpoint first, and cache the bundle.

    options: None for a bundle. full_check: check the hashes of all files, even if checked before.
    one_sequence: compile only the functions for one prompt at a time, unless all are cached.
    draft: whether `model` is a draft model for speculative decoding.
    """
    path = model.path if isinstance(model, Bundle) else Path(model).expanduser()
    if is_bundle(model):
        if options is not None:
            raise PipelineError(f"{path} is already compiled; remove the compiler options, or give the checkpoint")
        return open_bundle(model if isinstance(model, Bundle) else path, full_check=full_check)
    from castiron.pipelines.checkpoints.catalogue import canonical_name
    from castiron.pipelines.compile.compile_model import existing
    from castiron.pipelines.compile.compile_options import Options
    from castiron.vmfb.compiler.iree_compile import is_installed

    options = options or (Options.for_draft(target) if draft else Options(target=target))
    source = path if path.exists() else canonical_name(model)
    cached, quick = (cached_path(source, chosen) for chosen in (options, options.for_one_sequence()))
    if (one_sequence or not is_installed()) and existing(cached) is None:
        options, cached = options.for_one_sequence(), quick
    if existing(cached) is None:
        cached = cache_folder("bundles") / cached.name
        if is_own(cached):
            # Remove the rest of a partly deleted bundle, which the compiler would not replace.
            shutil.rmtree(cached, ignore_errors=True)
        claim(cached)
    elif not path.exists() and not is_installed():
        # Where nothing can be compiled, a name needs no download.
        return open_bundle(cached, full_check=full_check)
    kind = "as a draft, with q4_0 weights" if draft else "with default options"
    message = f"compiling {model} once, {kind}; castiron compile takes others" if announce else None
    arguments = options, progress, evaluate, existing(quick), message
    try:
        built = compile_to(source, cached, *arguments)
    except (OSError, BundleError):
        # The cache may be read-only, and its bundle made by another version of castiron.
        if (folder := cache_folder("bundles")) == cached.parent:
            raise
        built = compile_to(source, folder / cached.name, *arguments)
    bundle = open_bundle(built, full_check=full_check)
    with contextlib.suppress(OSError):
        # The folder's time is that of the last use, which castiron list shows.
        os.utime(built)
    if cached != quick and is_own(quick):
        shutil.rmtree(quick, ignore_errors=True)
    return bundle


def check_draft_model(
    draft: str | Path | Bundle, model: str | Path | Bundle, options: Options | None = None, progress: Report | None = None
) -> None:
    """Raise PipelineError if two models have different vocabularies; compile neither."""
    from castiron.pipelines.compile.compile_options import Options
    from castiron.pipelines.text.generate import check_verifies, check_vocabularies

    if is_bundle(model):
        if is_bundle(draft):
            return  # `open_draft` compares these
        check_verifies(open_bundle(model if isinstance(model, Bundle) else Path(model).expanduser()))
    with Progress(quiet=progress is not None) as bar:
        vocabularies = [
            _vocabulary(*each, progress or bar) for each in ((draft, Options.for_draft()), (model, options or Options()))
        ]
    check_vocabularies(*vocabularies)


def _vocabulary(model: str | Path | Bundle, options: Options, progress: Report) -> Vocabulary:
    from castiron.emitter.models import read_config
    from castiron.pipelines.checkpoints.catalogue import canonical_name
    from castiron.pipelines.checkpoints.checkpoint import check_tokenizer, tokenizer_of
    from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
    from castiron.pipelines.compile.compile_model import existing
    from castiron.pipelines.text.generate import Vocabulary
    from castiron.pipelines.text.tokenizer import Tokenizer

    path = model.path if isinstance(model, Bundle) else Path(model).expanduser()
    source = path if path.exists() else canonical_name(model)
    paths = [path] if is_bundle(model) else [cached_path(source, each) for each in (options, options.for_one_sequence())]
    if bundle := next(filter(None, map(existing, paths)), None):
        return Vocabulary.of(bundle)
    checkpoint = open_checkpoint(source, progress)
    if checkpoint.encoding:
        raise PipelineError(f"{checkpoint.path} is an embedding model, for which there are no drafts; leave --draft-model out")
    size = read_config(checkpoint.config).vocab
    content = check_tokenizer(checkpoint, size)
    load = lambda: Tokenizer(tokenizer_of(checkpoint.tokenizer or {}, checkpoint.path), vocab=size)
    return Vocabulary(checkpoint.path, size, content and hashlib.sha256(content).hexdigest(), load)


def compile_to(
    model: str | Path,
    out: Path,
    options: Options,
    progress: Report | None = None,
    evaluate: Evaluate | None = None,
    packed: Bundle | None = None,
    message: str | None = None,
) -> Path:
    """Compile a model into a directory, one thread at a time; print `message` before."""
    from castiron.pipelines.compile.compile_model import compile_model

    announce = (lambda: print_message(message)) if message else lambda: None
    with _lock, Progress(quiet=progress is not None) as bar:
        report = compile_model(model, out, options, progress or bar, evaluate=evaluate, packed=packed, announce=announce)
    return report.bundle


def options_of(**options: Any) -> Options:
    """Return `Options` from keyword arguments; sizes may be an int, or None for no size."""
    from castiron.pipelines.compile.compile_options import FORMER_NAMES, Options

    options = {FORMER_NAMES.get(name, name): value for name, value in options.items()}
    for name in {"prefill", "batch", "verify_widths", "embed"} & options.keys():
        sizes = options[name]
        options[name] = () if sizes is None else (sizes,) if isinstance(sizes, int) else sizes
    return Options(**options)


def is_bundle(model: str | Path | Bundle) -> bool:
    """Return whether `model` is a bundle or the path of a bundle, even if it is damaged."""
    if isinstance(model, Bundle):
        return True
    path = Path(model).expanduser()
    return (path / "manifest.json").exists() or path.suffix == ".castiron" or locate.is_bundle(path)


def require_generation(bundle: Bundle) -> Bundle:
    """Return the bundle; raise PipelineError if it is an embedding model."""
    if bundle.manifest.encoder:
        raise PipelineError(f"{bundle.path} is an embedding model and cannot generate text; use castiron embed")
    return bundle


def require_cpu(bundle: Bundle, command: str) -> Bundle:
    """Return the bundle; raise PipelineError if it is compiled for a GPU."""
    if bundle.manifest.target.driver:
        problem = f"castiron {command} measures CPU kernels, but {bundle.path} is compiled for a GPU"
        raise PipelineError(f"{problem}; compile the model without --target")
    return bundle


def cached_path(model: str | Path, options: Options) -> Path:
    """Return the cache path of a bundle compiled from the checkpoint `model` with `options`."""
    name = bundle_name(model)
    chosen, default = (asdict(o) | {"threads": o.threads_or_cores} for o in (options, type(options)()))
    if chosen != default:
        name += f"-{_digest(json.dumps(chosen).encode())}"
    return cache_root() / "bundles" / name


def bundle_name(model: str | Path) -> str:
    """Return the name, in the cache, of a bundle compiled from `model` with default options."""
    path = Path(model)
    if path.exists():
        return f"{path.resolve().name.removesuffix('.gguf')}-{_digest(bytes(path.resolve()))}"
    hub = HubName.read(str(model))
    return f"{hub.short}-{_digest(str(hub).encode())}" if hub else str(model)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]
