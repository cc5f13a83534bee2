"""List the models of the catalogue, bundles, and supported formats.

Bundles are those in ./build and in the folders given: directories with a manifest.json, and files
that castiron pack wrote. Only manifests are read.
"""

import argparse
import json
import textwrap
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

--json prints one object: catalogue (name, bytes, licence, fetched), bundles (path, name,
model_type, context, weights, target, bytes, packed; or path and error), families (values of
model_type), encoders, text_parts (of models that also see or hear), gguf_architectures, gguf_types,
safetensors_types.
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
    result = {"catalogue": catalogue(), "bundles": [bundle(path) for path in found], **formats()}
    print(json.dumps(result, ensure_ascii=False) if args.json else sanitised("\n".join(table(result))))
    return 0


def bundles_at(path: Path) -> Iterator[Path]:
    """Yield `path` itself if it is a bundle, else the bundles in it."""
    if is_bundle(path):
        yield path
    elif path.is_dir():
        yield from sorted(entry for entry in path.iterdir() if is_bundle(entry))


def is_bundle(path: Path) -> bool:
    """Return whether `path` is a directory with a manifest, or a packed file; it may be invalid."""
    if path.is_dir():
        # Staging directories begin with a dot.
        return (path / "manifest.json").is_file() and not path.name.startswith(".")
    return path.suffix == ".castiron" and is_archive(path)


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


def formats() -> dict[str, list[str]]:
    """Return the model families and file formats that castiron reads."""
    from castiron.emitter.models import ENCODERS, FAMILIES
    from castiron.pipelines.checkpoints.gguf_architectures import architecture_names
    from castiron.pipelines.checkpoints.gguf_file import CODEC_OF_GGML_TYPE
    from castiron.pipelines.checkpoints.hf_files import CODEC_OF_DTYPE
    from castiron.pipelines.checkpoints.hf_tensors import TEXT_PARTS

    return {
        "families": sorted(FAMILIES),
        "encoders": sorted(ENCODERS),
        "text_parts": sorted(TEXT_PARTS),
        "gguf_architectures": sorted(architecture_names()),
        "gguf_types": [codec.upper() for codec in CODEC_OF_GGML_TYPE.values()],
        "safetensors_types": list(CODEC_OF_DTYPE),
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
    for key in ("families", "encoders", "text_parts", "gguf_architectures", "gguf_types", "safetensors_types"):
        text = f"{key.replace('_', ' ').replace('gguf', 'GGUF'):<20}{', '.join(result[key])}"
        lines += ["", *textwrap.wrap(text, 100, subsequent_indent=" " * 20, break_on_hyphens=False)]
    return lines
