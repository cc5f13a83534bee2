"""Opening a bundle rejects an incomplete, changed or foreign one; writing is atomic."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from castiron.emitter.abi import functions
from castiron.vmfb.bundle import bundle
from castiron.vmfb.bundle.archive import Part
from castiron.vmfb.bundle.bundle import BundleWriter, open_bundle
from castiron.vmfb.bundle.manifest import MODEL, TOKENIZER, WEIGHTS, BundleError, dump, parse
from castiron.vmfb.run.session import Session
from castiron.vmfb.targets import TILES
from tests.vmfb import toy
from tests.vmfb.hostile_bundles import rejection


@pytest.fixture
def copy(toy_dir, tmp_path):
    """A bundle that a test may damage."""
    return shutil.copytree(toy_dir, tmp_path / "bundle")


DELETED = object()


def change(directory, *keys, value) -> None:
    """Set or delete a value in the manifest's JSON."""
    path = directory / "manifest.json"
    manifest = node = json.loads(path.read_text())
    for key in keys[:-1]:
        node = node[key]
    node[keys[-1]] = value
    if value is DELETED:
        del node[keys[-1]]
    path.write_text(json.dumps(manifest))


def test_a_written_manifest_is_read_back(toy_dir):
    opened = open_bundle(toy_dir)
    assert dataclasses.replace(opened.manifest, files={}) == toy.manifest()
    assert set(opened.manifest.files) == {MODEL, WEIGHTS, "compile.log"}
    assert opened.manifest.widths("prefill") == toy.WIDTHS and opened.manifest.context == toy.CONTEXT
    assert (opened.tokenizer, opened.chat_template) == (None, None)
    assert parse(dump(opened.manifest), "here") == opened.manifest


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (["schema"], 2, "has manifest schema 2, but this castiron reads schema 10"),
        (["schema"], True, "has manifest schema True"),
        (["name"], DELETED, "missing field: name"),
        (["states", 0, "colour"], 1, "unknown field: states[0].colour"),
        (["files", "../evil"], {"size": 1, "sha256": "0" * 64}, "'files' lists ../evil, which is neither a standard file"),
        (
            ["files", "tokens_7.vmfb"],
            {"size": 1, "sha256": "0" * 64},
            "'files' lists tokens_7.vmfb, which is neither a standard file nor the module of a function",
        ),
        (["files", WEIGHTS, "sha256"], "xyz", "'files.weights.irpa.sha256' is 'xyz', not 64 lowercase hex digits"),
        (["files", WEIGHTS], DELETED, "manifest.json does not list weights.irpa;"),
        (["vocab"], True, "vocab is True; it must be an integer"),
        (["vocab"], 0, "manifest field 'vocab' is 0; it must be at least 1"),
        (["max_context"], 25, "'states.k' has 24 positions; it must have 25 (max_context)"),
        (["context"], 25, "'max_context' is 24; it must be at least the context, 25"),
        (["states", 0, "shape"], [24], "'states.k': shape [24] is invalid for a positional state"),
        (["states", 1, "storage"], "f8", "'states.v': storage is 'f8', not one of f32, f16, q8_0"),
        (["states", 1, "kind"], "odd", "'states.v': kind is 'odd', not one of positional, window, recurrent"),
        (["states", 0, "window"], 5, "'states.k': window 5 is invalid for a positional state"),
        (["states", 0, "kind"], "window", "'states.k': window 0 is invalid for a window state"),
        (["states", 1, "name"], "k", "'states' has two states named k"),
        (["functions"], [], "'functions' lists decode functions of widths [] (tokens a call); it must list one, of width 1"),
        (["functions", 0, "role"], "evil", "'functions' has the unknown role evil; use one of decode, prefill"),
        (["target", "features"], None, "target.features is None; it must be a list"),
        (["tokens", "eos"], [32], "'tokens' has id 32, but the vocabulary has 32 tokens"),
    ],
)
def test_rejects_invalid_manifests(copy, keys, value, message):
    change(copy, *keys, value=value)
    found = rejection(copy)
    assert message in found and str(copy) in found and "again" in found


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ({"prefill": (25,)}, "'functions' has a width of 25 tokens; it must be 2 to 24, the context"),
        ({"prefill": (1,)}, "'functions' has a width of 1 tokens; it must be 2 to"),
        ({"verify": (25,)}, "'functions' has a width of 25 tokens; it must be 2 to"),
        ({"prefill": (4, 4)}, "'functions' has prefill functions of widths [4, 4]; use distinct widths"),
        ({"batch": (0,)}, "'functions' has batch functions of widths [0]; use distinct widths of at least 1"),
    ],
)
def test_rejects_invalid_functions(copy, widths, message):
    wrong = dataclasses.replace(open_bundle(copy).manifest, functions=functions({"decode": (1,), **widths}))
    (copy / "manifest.json").write_bytes(dump(wrong))
    assert message in rejection(copy)


@pytest.mark.parametrize(
    ("original", "with_long", "message"),
    [
        (None, True, "'functions' is not in the order"),
        (9, False, "'functions' is not in the order"),
        (24, True, "'original_context' is 24; it must be at least 1 and below max_context, 24"),
        (0, True, "'original_context' is 0"),
    ],
)
def test_rejects_an_original_context_without_functions_for_longer_texts(copy, original, with_long, message):
    made = functions({"decode": (1,), "prefill": (4, 8)}, with_long)
    wrong = dataclasses.replace(open_bundle(copy).manifest, functions=made, original_context=original)
    (copy / "manifest.json").write_bytes(dump(wrong))
    assert message in rejection(copy)


def test_functions_of_a_width_may_have_a_module_of_their_own(copy, toy_dir, tmp_path, compile_cache):
    """Functions of 8 tokens are in `tokens_8.vmfb` if listed, else in `model.vmfb`."""
    prompt = [1, 2, 3, 4, 5, 6, 7]
    narrow = toy.write(tmp_path / "narrow", widths=(4,), cache_dir=compile_cache).path

    def put(source: Path, name: str) -> None:
        shutil.copy(source / MODEL, copy / name)
        change(copy, "files", name, value=json.loads((source / "manifest.json").read_text())["files"][MODEL])

    put(narrow, MODEL)
    with pytest.raises(BundleError, match="model.vmfb has no function prefill_8"):
        Session(copy, 1)
    put(toy_dir, "tokens_8.vmfb")
    assert open_bundle(copy).manifest.modules == (MODEL, "tokens_8.vmfb")
    assert Session(copy, 1).prefill(prompt) == Session(toy_dir, 1).prefill(prompt)
    put(narrow, "tokens_8.vmfb")
    with pytest.raises(BundleError, match="tokens_8.vmfb has no function prefill_8"):
        Session(copy, 1)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_rejects_a_manifest_that_is_not_an_object(copy, text):
    (copy / "manifest.json").write_text(text)
    assert "compile the bundle again" in rejection(copy)


@pytest.mark.parametrize("name", [MODEL, WEIGHTS])
def test_rejects_a_changed_file(copy, name):
    path = copy / name
    original = path.read_bytes()
    open_bundle(copy)
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    os.utime(path, ns=(1, 1))
    assert f"sha256 differs from the manifest: {copy / name}" in rejection(copy)
    path.write_bytes(original[:-1])
    assert f"has {len(original) - 1} bytes, but {len(original)} in the manifest" in rejection(copy)
    path.unlink()
    assert f"missing file in bundle: {copy / name}" in rejection(copy)


def test_rejects_other_paths(tmp_path):
    assert "absent: no such file or directory" in rejection(tmp_path / "absent")
    assert "(no manifest.json); run castiron compile" in rejection(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    assert "circle: not a directory" in rejection(tmp_path / "circle")


def test_a_bundle_for_other_cpus_can_only_be_inspected(copy):
    change(copy, "target", "features", value=["avx512zz"])
    change(copy, "target", "cpu", value="Other CPU")
    message = rejection(copy)
    assert "Other CPU" in message and "lacks avx512zz" in message and "--target" in message
    assert open_bundle(copy, run=False).manifest.target.cpu == "Other CPU"
    change(copy, "target", "arch", value="sparc")
    assert "is compiled for sparc, but this machine is" in rejection(copy)


def test_rejects_amx_tiles_that_the_system_does_not_permit(copy, monkeypatch):
    change(copy, "target", "features", value=[TILES])
    change(copy, "target", "name", value="sapphirerapids")
    monkeypatch.setattr(bundle, "missing_features", lambda target: ())
    monkeypatch.setattr(bundle, "host_arch", lambda: open_bundle(copy, run=False).manifest.target.arch)
    monkeypatch.setattr(bundle, "can_use_tiles", lambda: False)
    assert re.search(r"sapphirerapids.*AMX tiles.*--target x86-64-v4-bf16", rejection(copy))
    monkeypatch.setattr(bundle, "can_use_tiles", lambda: True)
    open_bundle(copy)


def test_rejects_other_iree_versions(copy):
    change(copy, "versions", "iree", value="3.99.1")
    message = rejection(copy)
    assert "compiled by IREE 3.99.1" in message and "iree-base-runtime==3.99.*" in message


def write(directory, *, manifest=toy.manifest(), **files):
    with BundleWriter(directory) as writer:
        for name, data in ({MODEL: b"m", WEIGHTS: b"w"} | files).items():
            writer.write(name, data)
        return writer.commit(manifest)


def check_unchanged(folder) -> None:
    """The folder has the bundle that was written with an old tokenizer, and no temporary files."""
    assert sorted(os.listdir(folder)) == ["b", "cache"]
    assert open_bundle(folder / "b").tokenizer.read_bytes() == b"old"


def test_optional_files_are_read_back(tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "{}", "chat_template.jinja": "ä"})
    opened = open_bundle(tmp_path / "b")
    assert str(opened.tokenizer) == str(tmp_path / "b" / TOKENIZER) and opened.chat_template == "ä"


def test_the_first_opening_hashes_copied_and_changed_files_only(tmp_path, monkeypatch):
    hashed, sha256 = [], Part.sha256
    path = write(tmp_path / "b").path
    monkeypatch.setattr(Part, "sha256", lambda part: hashed.append(str(part)) or sha256(part))
    open_bundle(path)
    assert hashed == []
    copy = shutil.copytree(path, tmp_path / "copy")
    open_bundle(copy)
    assert hashed == [str(copy / MODEL), str(copy / WEIGHTS)]
    (path / WEIGHTS).write_bytes(b"x")
    assert f"sha256 differs from the manifest: {path / WEIGHTS}" in rejection(path)


def test_a_failed_write_keeps_the_old_bundle(tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "old"})
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), BundleWriter(tmp_path / "b") as writer:
            writer.write(MODEL, b"new")
            raise error
    with BundleWriter(tmp_path / "b") as writer:
        writer.write(MODEL, b"never committed")
    check_unchanged(tmp_path)


def test_a_failed_rename_restores_the_old_bundle(tmp_path, monkeypatch):
    write(tmp_path / "b", **{TOKENIZER: "old"})
    rename = os.rename

    def fail(source, target):
        if Path(source).name == "new":
            raise OSError(errno.EIO, "no", source)
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(BundleError, match="cannot write .*b: no"):
        write(tmp_path / "b")
    check_unchanged(tmp_path)


def test_an_invalid_bundle_is_not_committed(tmp_path):
    with pytest.raises(BundleError, match="lacks weights.irpa; write that file"), BundleWriter(tmp_path / "b") as writer:
        writer.write(MODEL, b"m")
        writer.commit(toy.manifest())
    with pytest.raises(BundleError, match="invalid manifest .*: manifest field 'vocab'"):
        write(tmp_path / "b", manifest=dataclasses.replace(toy.manifest(), vocab=-1))
    assert os.listdir(tmp_path) == []


def test_a_new_bundle_replaces_all_files(tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "old"})
    write(tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == ["b", "cache"] and not (tmp_path / "b" / TOKENIZER).exists()


def test_only_bundles_and_empty_directories_are_replaced(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "b")
    (tmp_path / "b" / "thesis.txt").write_text("years of work")
    for name, text in (("b/manifest.json", "{}"), ("c/manifest.json", "no json"), ("d/model.vmfb", "")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        with pytest.raises(BundleError, match="contains files that are not from a bundle"), BundleWriter(path.parent):
            pass
        assert path.read_text() == text
    assert (tmp_path / "b" / "thesis.txt").read_text() == "years of work" and sorted(os.listdir(tmp_path)) == [
        "b",
        "c",
        "cache",
        "d",
    ]
    (tmp_path / "file").write_text("x")
    for path, message in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "b", "cannot write")):
        with pytest.raises(BundleError, match=message), BundleWriter(path):
            pass


@pytest.mark.parametrize("by", ["opening", "writing"])
def test_a_bundle_that_a_killed_writer_moved_is_restored(by, tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "good"})
    previous = tmp_path / ".b.castiron-0123abcd" / "previous"
    previous.mkdir(parents=True)
    os.rename(tmp_path / "b", previous / "b")
    if by == "writing":
        with BundleWriter(tmp_path / "b") as alive:
            with BundleWriter(tmp_path / "b"):
                assert alive.directory.is_dir()
            assert sorted(os.listdir(tmp_path)) == [alive.directory.parent.name, "b", "cache"]
    assert open_bundle(tmp_path / "b").tokenizer.read_bytes() == b"good"
    assert sorted(os.listdir(tmp_path)) == ["b", "cache"]


def test_rejects_unknown_file_names(tmp_path):
    with BundleWriter(tmp_path / "b") as writer, pytest.raises(ValueError, match="a bundle cannot have a file named"):
        writer.write("../escape", b"")
