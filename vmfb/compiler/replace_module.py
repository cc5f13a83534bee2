"""Replace a bundle's compiled module with one that the user compiled with iree-compile."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
from dataclasses import replace
from pathlib import Path

import iree.runtime as rt

from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.bundle import Bundle, BundleWriter
from castiron.vmfb.bundle.manifest import LOG, MODEL, TEXT, BundleError, Manifest, is_module
from castiron.vmfb.device.cpu_device import vm_instance
from castiron.vmfb.device.program import Program, check_functions
from castiron.vmfb.targets import missing_features

# Manifest keys of the replaced module; without "key", `castiron compile` compiles again.
MODULE_KEYS = ("key", "flags", "text_sha256", "seconds", "iree_compile_seconds", "tuned", "arithmetic")


def replace_module(bundle: Bundle, module: Path, out: Path) -> Bundle:
    """Write a copy of `bundle` to `out`, with the user's .vmfb file instead of its modules.

    The manifest records it in `compile.custom_module`; measurements of the old modules are dropped.
    BundleError if the runtime cannot read the module, a function is missing or has other types, or
    (on a machine that can run the bundle) a parameter is not in the weights file.
    """
    _check_module(module, bundle.manifest)
    old = bundle.manifest
    runtime = importlib.metadata.version("iree-base-runtime")
    custom = {"module": str(module.resolve()), "sha256": Part.of(module).sha256(), "runtime": runtime}
    compile_ = {key: value for key, value in old.compile.items() if key not in MODULE_KEYS} | {"custom_module": custom}
    versions = replace(old.versions, iree=runtime)
    manifest = replace(old, compile=compile_, versions=versions, accuracy=None, speed=None)
    replaced = {*filter(is_module, old.files), LOG, TEXT}
    with BundleWriter(out) as writer:
        for name in old.files:
            if name not in replaced:
                writer.link(bundle, name)
        shutil.copyfile(module, writer.path(MODEL))
        hashes = {name: file.sha256 for name, file in old.files.items() if name not in replaced}
        if not missing_features(old.target):
            # Loading reads every parameter.
            files = {name: file for name, file in old.files.items() if name not in replaced} | {MODEL: old.files[MODEL]}
            try:
                Program(Bundle(writer.directory, replace(manifest, files=files)), 1)
            except BundleError as error:
                reason = re.search(r"rejects \S+ \((.*)\);", str(error))
                raise BundleError(
                    f"module does not fit the bundle's weights: {module} ({reason[1] if reason else error}); "
                    "compile the MLIR file that castiron compile --save-temps wrote for this bundle"
                ) from None
        return writer.commit(manifest, hashes)


def _check_module(module: Path, manifest: Manifest) -> None:
    try:
        loaded = rt.VmModule.mmap(vm_instance(), str(module))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise BundleError(
            f"cannot read module: {module} ({reason}); compile it with an iree-compile of the same version "
            "as the installed IREE runtime"
        ) from None
    remedy = "compile the MLIR file that castiron compile --save-temps wrote, or a change of it"
    check_functions(module, loaded, manifest, manifest.functions, remedy)
