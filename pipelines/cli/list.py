"""List the models of the catalogue, and bundles.

Bundles are those in ./build and in the folders given: directories with a manifest.json, and files
that castiron pack wrote. Only manifests are read.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from castiron.pipelines.cli.options import add_options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.locate import is_archive
from castiron.pipelines.terminal import megabytes, sanitised

EXAMPLES = """\
examples:
  castiron list
  castiron list ~/bundles model.castiron --json

--json prints one object: catalogue (name, bytes, licence, fetched) and bundles (path, name,
model_type, context, weights, target, bytes, packed; or path and error).
"""
FOLDER = Path("build")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("paths", metavar="DIR|FILE", nargs="*", help="bundles, or folders of bundles, besides ./build")
    add_options(parser, "--json")


def main(args: argparse.Namespace) -> int:
    named = list(map(Path, args.paths))
    if missing := [path for path in named if not path.exists()]:
        raise PipelineError(f"{missing[0]}: no such file or directory; give a bundle or a folder of bundles")
    found = dict.fromkeys(bundle for path in (FOLDER, *named) for bundle in bundles_at(path))
    result = {"catalogue": catalogue(), "bundles": [bundle(path) for path in found]}
    print(json.dumps(result, ensure_ascii=False) if args.json else sanitised("\n".join(table(result))))
    return 0


def bundles_at(path: Path) -> Iterator[Path]:
    """Yield `path` itself if it is a bundle, else the bundles in it; they may be invalid."""
    is_directory = lambda entry: (entry / "manifest.json").is_file() and not entry.name.startswith(".")
    is_bundle = lambda entry: is_directory(entry) or entry.suffix == ".castiron" and is_archive(entry)
    if is_bundle(path):
        yield path
    elif path.is_dir():
        yield from sorted(filter(is_bundle, path.iterdir()))


def catalogue() -> list[dict]:
    """Return the facts of the models that can be fetched by name."""
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE
    from castiron.vmfb.cache import cache_root

    folder = cache_root() / "models"
    return [
        {"name": model.name, "bytes": model.size, "licence": model.licence, "fetched": (folder / model.file).is_file()}
        for model in CATALOGUE.values()
    ]


def bundle(path: Path) -> dict:
    """Return facts from the manifest of a bundle, or the error that reading it raised."""
    from castiron.vmfb.bundle import read_manifest
    from castiron.vmfb.manifest import BundleError

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
    """Format the result as text."""
    width = max(map(len, [row["name"] for row in result["catalogue"]] + [row["path"] for row in result["bundles"]]))
    lines = ["models of the catalogue"]
    for model in result["catalogue"]:
        state = "fetched" if model["fetched"] else "fetched by castiron compile"
        lines.append(f"  {model['name']:<{width}}  {megabytes(model['bytes']):>10}  {model['licence']}, {state}")
    lines += ["", "bundles" if result["bundles"] else f"no bundles in {FOLDER}: castiron compile NAME makes one"]
    for row in result["bundles"]:
        if "error" in row:
            lines.append(f"  {row['path']:<{width}}  {row['error']}")
            continue
        facts = f"{row['model_type']}, context {row['context']}, {row['weights']} weights, {row['target']}"
        lines.append(f"  {row['path']:<{width}}  {megabytes(row['bytes']):>10}  {facts}")
    return lines
