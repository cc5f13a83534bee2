"""Lists the models of the catalogue, and the bundles in ./build and in the folders named.

A bundle is a directory with a manifest.json, or a file that castiron pack wrote. Only manifests are read.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from castiron.pipelines.commands.options import megabytes
from castiron.pipelines.harmless import harmless
from castiron.pipelines.places import is_archive

EXAMPLES = """\
examples:
  castiron list
  castiron list ~/bundles model.castiron --json

--json prints one object: catalogue (name, bytes, licence, fetched), bundles (path, name, model_type, context, weights,
target, bytes, packed, or path and error for one that cannot be read).
"""
PLACE = Path("build")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("places", metavar="DIR|FILE", nargs="*", help="bundles, or folders of bundles, besides ./build")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(args: argparse.Namespace) -> int:
    from castiron.pipelines.errors import PipelineError

    named = list(map(Path, args.places))
    if absent := [place for place in named if not place.exists()]:
        raise PipelineError(f"{absent[0]} is not there; castiron list takes bundles and folders of bundles")
    found = dict.fromkeys(path for place in (PLACE, *named) for path in bundles_at(place))
    result = {"catalogue": catalogue(), "bundles": [bundle(path) for path in found]}
    print(json.dumps(result, ensure_ascii=False) if args.json else harmless("\n".join(table(result))))
    return 0


def bundles_at(place: Path) -> Iterator[Path]:
    """The place itself if it is a bundle, or those of its entries that are."""
    if is_bundle(place):
        yield place
    elif place.is_dir():
        yield from sorted(path for path in place.iterdir() if is_bundle(path))


def is_bundle(path: Path) -> bool:
    """A directory with a manifest, or a file with a zip file's first bytes."""
    if path.is_dir():
        # A writer's half-made directory begins with a dot.
        return (path / "manifest.json").is_file() and not path.name.startswith(".")
    return path.suffix == ".castiron" and is_archive(path)


def catalogue() -> list[dict]:
    from castiron.pipelines.checkpoints.catalogue import CATALOGUE
    from castiron.vmfb.cache import cache_root

    folder = cache_root() / "models"
    return [
        {"name": model.name, "bytes": model.size, "licence": model.licence, "fetched": (folder / model.file).is_file()}
        for model in CATALOGUE.values()
    ]


def bundle(path: Path) -> dict:
    """What the manifest at `path` says, unchecked, or why it says nothing."""
    from castiron.vmfb.bundle import manifest_at
    from castiron.vmfb.manifest import BundleError

    try:
        manifest = manifest_at(path)
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
    """The result for a person."""
    width = max(
        len(row.get("name") or row["path"]) for row in (*result["catalogue"], *({"path": b["path"]} for b in result["bundles"]))
    )
    lines = ["models of the catalogue"]
    for model in result["catalogue"]:
        there = "fetched" if model["fetched"] else "castiron compile fetches it"
        lines.append(f"  {model['name']:<{width}}  {megabytes(model['bytes']):>10}  {model['licence']}, {there}")
    lines += ["", "bundles" if result["bundles"] else f"no bundles in {PLACE}: castiron compile NAME makes one"]
    for row in result["bundles"]:
        if "error" in row:
            lines.append(f"  {row['path']:<{width}}  {row['error']}")
            continue
        facts = f"{row['model_type']}, context {row['context']}, {row['weights']} weights, {row['target']}"
        lines.append(f"  {row['path']:<{width}}  {megabytes(row['bytes']):>10}  {facts}")
    return lines
