"""Bundles for whoever names a model: one that is there already, or one that is compiled once and kept."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from castiron.pipelines import places
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.hub_name import HubName
from castiron.pipelines.progress import Progress, say
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.cache import cache_root

if TYPE_CHECKING:
    from castiron.pipelines.casting.compile import Options

Report = Callable[[str, float], None]

_lock = threading.Lock()


def cast(
    model: str | Path | Bundle, options: Options | None = None, progress: Report | None = None, *, tells: bool = False
) -> Bundle:
    """The bundle of `model`: itself, or at its path; of a GGUF file, an HF directory or a name, that which is
    compiled below `cache_root()/bundles` with these options, unless it lies there and is up to date.

    `progress(stage, done)` gets the share done of each stage; a terminal has a bar without it. With `tells` a line on stderr
    says that there was none. PipelineError for options that a bundle was not asked with; else what `open_bundle` and
    `compile_model` raise.
    """
    path = model.path if isinstance(model, Bundle) else Path(model).expanduser()
    if is_bundle(model):
        if options is not None:
            raise PipelineError(f"{path} is compiled already and takes no options; give the checkpoint that it was made of")
        return model if isinstance(model, Bundle) else open_bundle(path)
    from castiron.pipelines.casting.compile import Options, existing

    options = options or Options()
    known = path if path.exists() else str(model)
    place = cached_place(known, options)
    if existing(place) is None:
        # What is left of a bundle that was not wholly cleared away would not be written over.
        shutil.rmtree(place, ignore_errors=True)
        if tells:
            say(f"casting {model}, once; castiron compile {model} does it with options of your own")
    return open_bundle(_compile(known, place, options, progress))


def compile(model: str | Path, out: str | Path, *, progress: Report | None = None, **options: Any) -> Bundle:
    """Compiles a GGUF file, an HF directory, or the model of a name, into the bundle directory `out`, as `castiron
    compile` does.

    `options` are the fields of `castiron.pipelines.casting.compile.Options`: context, weights, adapter, calibrate, numerics,
    cache, lowering, target, batch, speculate, embed, threads, tuned. A bundle that is up to date is left as it is. Raises what
    `compile_model` raises; then nothing is written.
    """
    place = _compile(Path(model).expanduser(), Path(out).expanduser(), options_of(**options), progress)
    # Another machine's bundle can be compiled here.
    return open_bundle(place, run=False)


def options_of(**options: Any) -> Options:
    """Options, where a size may stand for a tuple of sizes and None for none."""
    from castiron.pipelines.casting.compile import Options

    for name in {"batch", "speculate", "embed"} & options.keys():
        sizes = options[name]
        options[name] = () if sizes is None else (sizes,) if isinstance(sizes, int) else tuple(sizes)
    return Options(**options)


def is_bundle(model: str | Path | Bundle) -> bool:
    """Whether `model` is a bundle, or there is one at its path, a directory or an archive; it need not be whole."""
    return isinstance(model, Bundle) or places.is_bundle(Path(model).expanduser())


def cached_place(model: str | Path, options: Options) -> Path:
    """Where the bundle of a checkpoint and these options is kept; a checkpoint that changes replaces its own."""
    usual = type(options)()
    path = Path(model)
    if path.exists():
        name = f"{path.resolve().name.removesuffix('.gguf')}-{_digest(bytes(path.resolve()))}"
    else:
        hub = HubName.read(str(model))
        name = f"{hub.short}-{_digest(str(hub).encode())}" if hub else str(model)
    told, untold = (asdict(o) | {"threads": o.threads_or_cores} for o in (options, usual))
    if told != untold:
        name += f"-{_digest(json.dumps(told).encode())}"
    return cache_root() / "bundles" / name


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:8]


def _compile(model: str | Path, out: Path, options: Options, progress: Report | None) -> Path:
    from castiron.pipelines.casting.compile import compile_model
    from castiron.pipelines.checking.likelihood import own_accuracy

    # Two threads would write in the same place.
    with _lock, Progress(quiet=progress is not None) as bar:
        return compile_model(model, out, options, progress or bar, evaluate=own_accuracy).bundle
