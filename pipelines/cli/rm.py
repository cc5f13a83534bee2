"""Remove a bundle; with the name of a catalogue model, also remove the downloaded checkpoint.

NAME is a name that castiron list shows, the path of a bundle, or the model that was compiled: its
catalogue name, org/name or path. castiron rm does not remove checkpoints that were given by path,
or files in the cache of Hugging Face Hub. It does not ask for confirmation. It fails if a process
uses the bundle.
"""

import argparse
import contextlib
import json
import os
import re
from pathlib import Path

from castiron.pipelines.cli.list import bundles_at
from castiron.pipelines.cli.options import add_options
from castiron.pipelines.errors import PipelineError, did_you_mean
from castiron.pipelines.locate import is_bundle
from castiron.pipelines.terminal import megabytes
from castiron.vmfb.atomic_write import locked
from castiron.vmfb.bundle.bundle import read_manifest
from castiron.vmfb.cache_folder import cache_path, is_own
from castiron.vmfb.file_errors import files_below

EXAMPLES = """\
examples:
  castiron rm smollm2-135m-instruct
  castiron rm build/smollm2-135m-instruct

--json prints one object: removed (paths) and bytes (freed).
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="bundle or model, as castiron list shows it")
    add_options(parser, "--json")


def main(args: argparse.Namespace) -> int:
    found = paths_of(args.name)
    if not found:
        known = [path.name for path in bundles_at(cache_path("bundles"))]
        raise PipelineError(f"{args.name}: no such bundle{did_you_mean(args.name, known) or '; castiron list shows bundles'}")
    for path in found:
        if user := process_using(path):
            raise PipelineError(f"{args.name} is in use by process {user}; end that process first")
    freed = sum(map(remove, found))
    result = {"removed": list(map(str, found)), "bytes": freed}
    print(json.dumps(result) if args.json else f"{args.name}: {megabytes(freed)} freed")
    return 0


def paths_of(name: str) -> list[Path]:
    """Return the bundles and the downloaded checkpoint of a name or path."""
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE, canonical_name
    from castiron.pipelines.compile.open_model import bundle_name

    path, bundles = Path(name), list(bundles_at(cache_path("bundles")))

    def compiled(name: str) -> list[Path]:
        # The name of a bundle that was compiled with other options ends with a hash of the options.
        pattern = re.compile(re.escape(name) + "(-[0-9a-f]{8})?")
        return [bundle for bundle in bundles if pattern.fullmatch(bundle.name)]

    given = [path] if is_bundle(path) else compiled(bundle_name(path)) if path.exists() else []
    if os.sep in name and path.exists():
        return given
    if (known := canonical_name(name)) in CATALOGUE:
        fetched = cache_path("models") / CATALOGUE[known].file
        cached = [*compiled(known), *[fetched] * (fetched.is_file() and is_own(fetched))]
    else:
        cached = [bundle for bundle in bundles if bundle.name == name] or ([] if path.exists() else compiled(bundle_name(name)))
    if given and cached:
        raise PipelineError(f"{name} is a path and a name in the cache; give {os.path.join('.', name)} or {cached[0]}")
    return given or cached


def process_using(path: Path) -> int | None:
    """Return the id of another process that uses a file of a bundle, or None; on Linux only."""
    location = os.path.realpath(path)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used = [os.readlink(file) for file in (process / "fd").iterdir()]
            used += [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text(errors="replace").splitlines()]
        except OSError:  # another user's process, or one that has ended
            continue
        if int(process.name) != os.getpid() and any(file == location or file.startswith(f"{location}/") for file in used):
            return int(process.name)
    return None


def remove(path: Path) -> int:
    if path.is_file() or path.is_symlink():
        files = [path]
    elif path.parent == cache_path("bundles") and is_own(path):
        files = [file for file, _ in files_below(path)]
    else:
        # Remove only the bundle's files, because the user may have put others into its directory.
        files = [path / "manifest.json", path / "compile.log", *(path / name for name in read_manifest(path).files)]
    freed = sum(file.lstat().st_size for file in files if file.exists())
    with locked(path.absolute().parent):
        for file in files:
            file.unlink(missing_ok=True)
        if path.is_dir():
            with contextlib.suppress(OSError):
                path.rmdir()
    return freed
