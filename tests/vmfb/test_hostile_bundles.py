"""A damaged or hostile bundle is rejected with a one-line error."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.open_model import open_or_compile
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.bundle.manifest import BundleError
from castiron.vmfb.run.state_file import StateError, read_head, write_state
from tests.support.hostile import ACCEPTED, REJECTED, fine
from tests.vmfb import hostile_bundles
from tests.vmfb.hostile_bundles import flip_byte, rejection

MUTANTS = 60


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    return hostile_bundles.write_valid(tmp_path_factory.mktemp("valid") / "toy")


@pytest.fixture
def toy(valid, tmp_path):
    """A bundle that a test may damage."""
    return shutil.copytree(valid, tmp_path / "toy")


def test_mutants_run_or_are_rejected(valid, tmp_path):
    assert hostile_bundles.verdict(valid) == ACCEPTED
    found = {}
    for number in range(MUTANTS):
        path = tmp_path / str(number)
        kind = hostile_bundles.mutant(number, valid, path)
        found[number] = kind, hostile_bundles.verdict(path, kind == "files")
    assert {n: verdict for n, verdict in found.items() if not fine(verdict[1])} == {}
    # Changed files are never run.
    assert all(verdict.startswith(REJECTED) for kind, verdict in found.values() if kind == "forged")


def test_module_and_weights_must_match_the_manifest(toy):
    """A consistent manifest of another model is rejected before any code of the module runs."""
    path = toy / "manifest.json"
    text = path.read_text()
    path.write_text(text.replace("32xf32", "64xf32").replace('"vocab": 32', '"vocab": 64'))
    assert "decode_step has " in rejection(toy)
    path.write_text(text)
    with open(toy / "weights.irpa", "r+b") as file:
        file.seek(100)
        file.write(b"\xff" * 8)
    hostile_bundles.rehash(toy)
    assert "weights.irpa (the weights file has a damaged table of tensors)" in rejection(toy)


def test_trust_decides_whether_stamps_are_used(toy, monkeypatch):
    hashed, sha256 = [], Part.sha256
    monkeypatch.setattr(Part, "sha256", lambda part: hashed.append(part) or sha256(part))
    files = json.loads((toy / "manifest.json").read_text())["files"]
    # Only the first opening and a changed time make the files be hashed.
    assert cli.main(["run", str(toy), "a", "-n", "1"]) == 0 and len(hashed) == len(files)
    assert cli.main(["run", str(toy), "a", "-n", "1"]) == 0 and len(hashed) == len(files)
    assert cli.main(["run", str(toy), "a", "-n", "1", "--trust", "never"]) == 0 and len(hashed) == 2 * len(files)
    # The cached bundle of a model name is checked too.
    monkeypatch.setattr("castiron.pipelines.compile.open_model.compile_to", lambda *_: toy)
    open_or_compile("smollm2-135m-instruct", full_check=True)
    assert len(hashed) == 3 * len(files)
    os.utime(toy / "weights.irpa", ns=(1, 1))
    open_bundle(toy)
    assert len(hashed) == 4 * len(files)
    flip_byte(toy / "weights.irpa")
    assert "sha256 differs from the manifest" in rejection(toy)


def test_rejects_pipes_and_devices_as_files(toy):
    for name in ("manifest.json", "weights.irpa", "tokenizer.json"):
        for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir):
            path = toy / name
            path.rename(toy.parent / name)
            make(path)
            assert name in rejection(toy)
            path.rmdir() if path.is_dir() else path.unlink()
            (toy.parent / name).rename(path)


def test_rejects_a_template_that_is_not_utf_8(toy):
    (toy / "chat_template.jinja").write_bytes(b"\xff\xfe")
    hostile_bundles.rehash(toy)
    with pytest.raises(BundleError, match="not UTF-8: .*chat_template.jinja"):
        load_tokenizer(toy)


def test_an_empty_tokenizer_with_a_valid_hash_is_a_one_line_error(toy, capsys):
    (toy / "tokenizer.json").write_bytes(b"")
    hostile_bundles.rehash(toy)
    assert cli.main(["run", str(toy), "a"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("count", ["1e400", "0", "[]", str(2**25)])
def test_rejects_a_state_file_with_an_invalid_token_count(count, tmp_path):
    path = tmp_path / "a.state"
    write_state(path, "b", np.arange(3), [])
    data = path.read_bytes().replace(b'"tokens": 3}', f'"tokens": {count}}}'.encode())
    with open(path, "wb") as file:
        file.write(data)
        # A sparse file that is large enough for this number of tokens.
        file.truncate(2**28)
    with pytest.raises(StateError, match="not a saved state"):
        read_head(path)


def test_rejects_a_pipe_or_device_as_state_file(tmp_path):
    os.mkfifo(tmp_path / "pipe.state")
    for path in (tmp_path / "pipe.state", Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_head(path)


KERNEL = {"paths": [], "calls": 1, "flops": [1, 0, 1], "bytes": [1, 0, 1], "weights": 0}


@pytest.mark.parametrize(
    ("name", "facts", "message"),
    [
        ("source", {"hub": 5}, "source.hub is 5; it must be an object"),
        ("source", {"left_out": {"a": "b"}}, "source.left_out.a is 'b'; it must be an integer"),
        (
            "compile",
            {"work": {"decode_step": {"k": KERNEL | {"flops": [1]}}}},
            "'compile.work': kernel k has 1 numbers in 'flops' and 3 in 'bytes'; give 3 in each",
        ),
        (
            "compile",
            {"work": {"decode_step": {"k": KERNEL | {"calls": 10**400}}}},
            "'compile.work': kernel k has a number above 2**63 - 1",
        ),
    ],
)
def test_rejects_source_and_compile_keys_of_other_types(toy, name, facts, message, capsys):
    path = toy / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: facts}))
    for command in (["run", str(toy), "a"], ["inspect", str(toy)]):
        assert cli.main(command) == 1
        assert message in capsys.readouterr().err
    assert cli.main(["list", str(toy)]) == 0 and message in capsys.readouterr().out


def test_rejects_small_files_over_the_limit(toy):
    manifest = json.loads((toy / "manifest.json").read_text())
    manifest["files"]["tokenizer.json"]["size"] = 10**10
    (toy / "manifest.json").write_text(json.dumps(manifest))
    os.truncate(toy / "tokenizer.json", 10**10)
    assert "'files.tokenizer.json.size' is 10000000000; the limit is" in rejection(toy)
    os.truncate(toy / "manifest.json", 10**10)
    assert "has 10000000000 bytes, but the limit is" in rejection(toy)
