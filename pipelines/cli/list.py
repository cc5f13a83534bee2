"""List the models of the catalogue, and the bundles on this machine.

Bundles are listed from ./build and from the given folders: directories with a manifest.json, and
files that castiron pack wrote. Then come the bundles in castiron's cache, with the time of their
last use; castiron run, chat, serve and load put them there. castiron rm removes a bundle.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.errors import PipelineError, similar_path
from castiron.pipelines.locate import is_archive
from castiron.pipelines.terminal import megabytes, sanitised
from castiron.vmfb.cache_folder import cache_path

EXAMPLES = """\
examples:
  castiron list
  castiron list ~/bundles model.castiron --json

--json prints one object: catalogue (name, file, packages, sha256, bytes, licence, fetched), bundles
(path, name, model_type, context, weights, target, bytes, packed; or path and error) and cached:
like bundles, with last_used (ISO 8601), the last used first.
"""
FOLDER = Path("build")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="DIR|FILE", nargs="*", help="bundles, or folders of bundles, besides ./build")
    add_options(parser, "--json")


def main(args: argparse.Namespace) -> int:
    named = list(map(Path, args.paths))
    if missing := [path for path in named if not path.exists()]:
        remedy = similar_path(missing[0]) or "; give a bundle or a folder of bundles"
        raise PipelineError(f"{missing[0]}: no such file or directory{remedy}")
    found = dict.fromkeys(bundle for path in (FOLDER, *named) for bundle in bundles_at(path))
    cached = sorted((bundle(path) | {"last_used": last_use(path)} for path in bundles_at(cache_path("bundles"))),
                    key=lambda row: row["last_used"], reverse=True)  # fmt: skip
    result = {"catalogue": catalogue(), "bundles": [bundle(path) for path in found], "cached": cached}
    print(json.dumps(result, ensure_ascii=False) if args.json else sanitised("\n".join(table(result))))
    return 0


def bundles_at(path: Path) -> Iterator[Path]:
    """Yield `path` if it is a bundle; otherwise yield the bundles that are in the folder `path`."""
    is_directory = lambda entry: (entry / "manifest.json").is_file() and not entry.name.startswith(".")
    is_bundle = lambda entry: is_directory(entry) or entry.suffix == ".castiron" and is_archive(entry)
    if is_bundle(path):
        yield path
    elif path.is_dir():
        yield from sorted(filter(is_bundle, path.iterdir()))


def catalogue() -> list[dict]:
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE

    return [
        {"name": model.name, "file": model.file, "packages": model.packages, "sha256": model.sha256, "bytes": model.size,
         "licence": model.licence, "fetched": (cache_path("models") / model.file).is_file()}
        for model in CATALOGUE.values()
    ]  # fmt: skip


def last_use(path: Path) -> str:
    """Return the time at which a cached bundle was last opened, in ISO 8601 and UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(path.stat().st_mtime))


def bundle(path: Path) -> dict:
    """Return the object that --json prints; an invalid bundle has only its path and an `error`."""
    from castiron.vmfb.bundle.bundle import read_manifest
    from castiron.vmfb.bundle.manifest import BundleError

    try:
        manifest = read_manifest(path)
    except BundleError as error:
        return {"path": str(path), "error": str(error)}
    return {
        "path": str(path),
        "name": manifest.name,
        "model_type": manifest.config.get("model_type"),
        "context": manifest.context,
        "weights": manifest.weights,
        "target": manifest.target.name,
        "bytes": sum(file.size for file in manifest.files.values()),
        "packed": path.is_file(),
    }


def table(result: dict) -> list[str]:
    cached = [row | {"path": Path(row["path"]).name} for row in result["cached"]]
    width = max(len(name) for name in [row["name"] for row in result["catalogue"]]
                + [row["path"] for row in result["bundles"] + cached])  # fmt: skip
    lines = ["models of the catalogue, from the Python package index"]
    for model in result["catalogue"]:
        state = "fetched" if model["fetched"] else "not fetched"
        lines.append(f"  {model['name']:<{width}}  {megabytes(model['bytes']):>10}  {model['licence']}, {state}")
        first, *others = model["packages"]
        lines.append(f"    {model['file']} from {first}{f' to {others[-1]}' if others else ''}")
    lines += ["", "bundles" if result["bundles"] else f"no bundles in {FOLDER}: castiron compile NAME makes one"]
    lines += [bundle_line(row, width) for row in result["bundles"]]
    if cached:
        lines += ["", f"compiled for run, chat and serve, in {cache_path('bundles')}"]
        lines += [bundle_line(row, width) for row in cached]
    return lines


def bundle_line(row: dict, width: int) -> str:
    used = f", used {row['last_used'][:16].replace('T', ' ')}" if "last_used" in row else ""
    if "error" in row:
        return f"  {row['path']:<{width}}  {row['error']}{used}"
    facts = f"{row['model_type']}, context {row['context']}, {row['weights']} weights, {row['target']}"
    return f"  {row['path']:<{width}}  {megabytes(row['bytes']):>10}  {facts}{used}"
