"""A module that was compiled by hand, put into a bundle: its functions must be the manifest's, and the bundle says so."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

from castiron.vmfb.archive import Part
from castiron.vmfb.bundle import Bundle, BundleWriter
from castiron.vmfb.disk import naming
from castiron.vmfb.manifest import LOG, MODEL, TEXT, BundleError, EntryPoint
from castiron.vmfb.program import Program
from castiron.vmfb.targets import missing_features

# Facts about the compilation that made the module before; without its key castiron compile makes the bundle anew.
OF_THE_MODULE = ("key", "flags", "text_sha256", "seconds", "iree_compile_seconds", "tuned", "arithmetic")


def repack(bundle: Bundle, module: Path, out: Path) -> Bundle:
    """Writes `bundle` with another `module` (a vmfb file) into the directory `out`, which may be the bundle's own.

    Of another bundle's files nothing is copied where the file system can link. The manifest says `compile.repacked`: the
    module's path, sha256 and the runtime that read it; what was measured of the old module is gone from it. BundleError for
    a file that is no module of this runtime, a function that is missing or has other types than the manifest's, and, where
    this machine can run the bundle, for one that asks for parameters that the bundle does not have.
    """
    check_functions(module, bundle.manifest.functions)
    old = bundle.manifest
    runtime = importlib.metadata.version("iree-base-runtime")
    fact = {"module": str(module.resolve()), "sha256": Part.of(module).sha256(), "runtime": runtime}
    compile_ = {key: value for key, value in old.compile.items() if key not in OF_THE_MODULE} | {"repacked": fact}
    versions = replace(old.versions, iree=runtime)
    manifest = replace(old, compile=compile_, versions=versions, accuracy=None, speed=None)
    with BundleWriter(out) as writer:
        for name in old.files:
            if name not in (MODEL, LOG, TEXT):
                _take(bundle, name, writer.path(name))
        shutil.copyfile(module, writer.path(MODEL))
        hashes = {name: file.sha256 for name, file in old.files.items() if name not in (MODEL, LOG, TEXT)}
        if not missing_features(old.target):
            # Loading asks for every parameter. The module's place is not the bundle's yet.
            files = {name: file for name, file in old.files.items() if writer.path(name).is_file()}
            try:
                Program(Bundle(writer.directory, replace(manifest, files=files)), 1)
            except BundleError as error:
                reason = re.search(r"refuses \S+ \((.*)\);", str(error))
                raise BundleError(
                    f"{module} does not load with the bundle's weights ({reason[1] if reason else error})"
                ) from None
        return writer.commit(manifest, hashes)


def check_functions(module: Path, functions: tuple[EntryPoint, ...]) -> None:
    """BundleError unless the module exports every one of `functions` with the types that the manifest has for it."""
    import iree.runtime as rt

    try:
        loaded = rt.VmModule.mmap(rt.VmInstance(), str(module))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise BundleError(
            f"{module} is no module that this IREE runtime reads ({reason}); compile it with iree-compile"
        ) from None
    exported = set(loaded.function_names)
    for function in functions:
        if function.name not in exported:
            raise BundleError(f"{module} has no function {function.name}, which the bundle's manifest lists")
        declared = loaded.lookup_function(function.name).reflection.get("iree.abi.declaration", "")
        found = signature(declared)
        for side, wanted in (("inputs", function.inputs), ("outputs", function.outputs)):
            if found[side] != wanted:
                raise BundleError(
                    f"{module}: {function.name} has {side} ({', '.join(found[side])}) where the bundle's manifest says "
                    f"({', '.join(wanted)}); compile the text that castiron compile --keep wrote, or a change of it"
                )


def signature(declaration: str) -> dict[str, tuple[str, ...]]:
    """Types of inputs and outputs out of IREE's own words for a function, as a manifest spells them: `8xi32`, `i32`."""
    return {f"{side}s": tuple(re.findall(rf"%{side}\d+: tensor<([^>]*)>", declaration)) for side in ("input", "output")}


def _take(bundle: Bundle, name: str, place: Path) -> None:
    """The file `name` of a bundle at `place`: linked where that is possible, or copied."""
    if not bundle.packed:
        with contextlib.suppress(OSError):
            os.link(bundle.path / name, place)
            return
    with naming(place), open(place, "wb") as file:
        bundle.part(name).sha256(file.write)
