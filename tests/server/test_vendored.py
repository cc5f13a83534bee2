"""The libraries of the chat page are the files that their projects published."""

from __future__ import annotations

import hashlib
import json

from castiron.pipelines.server.routes import PAGE, PARTS

VENDOR = PAGE.joinpath("vendor")


def test_vendored_files_have_the_recorded_hashes():
    libraries = json.loads(VENDOR.joinpath("vendored.json").read_bytes())
    recorded = {name: sha256 for library in libraries.values() for name, sha256 in library["sha256"].items()}
    found = {file.name: file.read_bytes() for file in VENDOR.iterdir() if file.name != "vendored.json"}
    assert {name: hashlib.sha256(data).hexdigest() for name, data in found.items()} == recorded
    for name, library in libraries.items():
        script, licence = library["sha256"]
        assert f"vendor/{script}" in PARTS and library["version"].encode() in found[script][:300], name
        assert library["licence"] and library["source"].endswith(f"-{library['version']}.tgz") and len(found[licence]) > 1000
