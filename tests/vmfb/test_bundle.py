"""A bundle is whole, unchanged and made for this machine, or it is refused in a sentence."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from castiron.vmfb import aside, bundle
from castiron.vmfb.archive import Part
from castiron.vmfb.bundle import BundleWriter, open_bundle
from castiron.vmfb.manifest import FILES, MODEL, TOKENIZER, WEIGHTS, BundleError, Manifest, dump, entry_points, parse
from castiron.vmfb.record import to_json
from castiron.vmfb.session import Session
from castiron.vmfb.targets import TILES
from tests.vmfb import toy_bundle
from tests.vmfb.conftest import CONTEXT, WIDTHS

WORK = {"calls": 1, "flops": [2, 0, 2], "bytes": [64, 0, 64]}


@pytest.fixture
def copy(toy_dir, tmp_path):
    """A bundle to spoil."""
    return shutil.copytree(toy_dir, tmp_path / "bundle")


def rewrite(directory, change) -> None:
    """Applies `change` to the manifest's JSON."""
    path = directory / "manifest.json"
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def set_at(*path_and_value):
    *path, last, value = path_and_value

    def change(manifest):
        for key in path:
            manifest = manifest[key]
        manifest[last] = value

    return change


def delete(*path):
    def change(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        del manifest[path[-1]]

    return change


def refusal(directory, **options) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(directory, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_what_is_written_is_what_is_read(toy_dir):
    opened = open_bundle(toy_dir)
    expected = toy_bundle.manifest(CONTEXT, WIDTHS)
    assert dataclasses.replace(opened.manifest, files={}) == expected
    assert set(opened.manifest.files) == {MODEL, WEIGHTS, "compile.log"}
    assert opened.manifest.prefill_widths == WIDTHS and opened.manifest.context == CONTEXT
    assert (opened.tokenizer, opened.chat_template) == (None, None)
    assert parse(dump(opened.manifest), "here") == opened.manifest


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_at("schema", 2), "has schema 2 and this castiron reads 4"),
        (delete("schema"), "has schema None"),
        (set_at("schema", True), "has schema True"),
        (set_at("colour", "red"), "colour is not a field that this version knows"),
        (set_at("states", 0, "colour", 1), "states[0].colour is not a field"),
        (set_at("files", MODEL, "colour", 1), "files.model.vmfb.colour is not a field"),
        (set_at("files", "../evil", {"size": 1, "sha256": "0" * 64}), "files.../evil is not a file"),
        (set_at("files", WEIGHTS, "sha256", "xyz"), "files.weights.irpa has no proper size and sha256"),
        (delete("files", WEIGHTS), "does not list weights.irpa"),
        (set_at("vocab", "32"), "vocab is '32', not a whole number"),
        (set_at("vocab", True), "vocab is True, not a whole number"),
        (set_at("vocab", 0), "vocab is 0, not a positive number"),
        (set_at("vocab", 33), "functions are not those of a castiron module with this vocabulary"),
        (set_at("context", 25), "states.k has 24 positions where the context is 25"),
        (set_at("states", 0, "shape", 3, 8), "functions are not"),
        (set_at("states", 0, "shape", 0, 0), "states.k.shape is [0, 24, 1, 4], which no positional state has"),
        (set_at("states", 0, "shape", [24]), "states.k.shape is [24], which no positional state has"),
        (set_at("states", 1, "dtype", "f8"), "states.v.dtype is 'f8', not one of f32"),
        (set_at("states", 1, "kind", "odd"), "states.v.kind is 'odd', not one of positional, window, recurrent"),
        (set_at("states", 0, "window", 5), "states.k has a window of 5, which no positional state of [2, 24, 1, 4] has"),
        (set_at("states", 0, "kind", "window"), "states.k has a window of 0, which no window state of [2, 24, 1, 4] has"),
        (set_at("states", 1, "name", "k"), "states have the same name twice"),
        (set_at("functions", 1, "width", 5), "functions are not"),
        (set_at("functions", 0, "name", "evil"), "functions are not"),
        (set_at("functions", 1, "inputs", [1]), r"functions[1].inputs[0] is 1, not a string"),
        (set_at("functions", {}), "functions is {}, not a list"),
        (set_at("codecs", {"f32": 1.5}), "codecs.f32 is 1.5, not a whole number"),
        (set_at("target", "features", None), "target.features is None, not a list"),
        (set_at("tokens", "eos", [32]), "tokens names 32, outside the vocabulary"),
        (set_at("config", []), "config is [], not an object"),
        (set_at("compile", {"work": []}), "compile.work is [], not an object"),
        (set_at("compile", {"work": {"f": {"k": {**WORK, "calls": None}}}}), "compile.work.f.k.calls is None, not a whole"),
        (set_at("compile", {"work": {"f": {"k": {**WORK, "bytes": [64]}}}}), "compile.work says of k what no kernel does"),
        (set_at("compile", {"work": {"f": {"k": {**WORK, "calls": 2**63}}}}), "compile.work says of k what no kernel does"),
        *(
            (delete(field.name), f"{field.name} is missing")
            for field in dataclasses.fields(Manifest)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        ),  # fmt: skip
    ],
)
def test_a_manifest_that_does_not_hold_is_refused(copy, change, message):
    rewrite(copy, change)
    said = refusal(copy)
    assert message in said and str(copy) in said and "again" in said


@pytest.mark.parametrize(
    ("prefill", "verify", "batches", "message"),
    [
        ((25,), (), (), "takes 25 tokens where the context is 24"),
        ((1,), (), (), "takes 1 tokens"),
        ((4,), (25,), (), "takes 25 tokens"),
        ((4, 4), (), (), "functions are not"),
        ((4,), (), (0,), "functions are not"),
        ((4,), (), (2, 2), "functions are not"),
    ],
)
def test_functions_that_no_module_has_are_refused(copy, prefill, verify, batches, message):
    manifest = open_bundle(copy).manifest
    widths = {"decode": (1,), "prefill": prefill, "verify": verify, "batch": batches}
    wrong = entry_points(manifest.states, manifest.vocab, widths)
    (copy / "manifest.json").write_bytes(dump(dataclasses.replace(manifest, functions=wrong)))
    assert message in refusal(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000])
def test_a_manifest_that_is_no_object_is_refused(copy, text):
    (copy / "manifest.json").write_text(text)
    assert "compile the bundle again" in refusal(copy)


@pytest.mark.parametrize("name", [MODEL, WEIGHTS])
def test_a_file_that_changed_is_refused(copy, name):
    path = copy / name
    original = path.read_bytes()
    open_bundle(copy)
    path.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    os.utime(path, ns=(1, 1))
    assert f"{name} is not the file that was written" in refusal(copy)
    path.write_bytes(original[:-1])
    assert f"has {len(original) - 1} bytes where the manifest says {len(original)}" in refusal(copy)
    path.unlink()
    assert f"{name} is missing" in refusal(copy)


def test_what_is_no_bundle_is_refused(tmp_path):
    assert "is not a directory" in refusal(tmp_path / "absent")
    assert "has no manifest.json: it is not a bundle" in refusal(tmp_path)
    (tmp_path / "circle").symlink_to("circle")
    assert "circle cannot be read: Too many levels of symbolic links" in refusal(tmp_path / "circle")


def test_a_second_opening_hashes_nothing_until_a_file_is_touched(copy, monkeypatch):
    hashed = []
    plain = Part.sha256
    monkeypatch.setattr(Part, "sha256", lambda part: hashed.append(part.path.name) or plain(part))
    open_bundle(copy)
    first, hashed[:] = sorted(hashed), []
    assert first == sorted([MODEL, WEIGHTS, "compile.log"])
    open_bundle(copy)
    assert hashed == []
    open_bundle(copy, full_check=True)
    assert sorted(hashed) == first
    hashed.clear()
    os.utime(copy / WEIGHTS, ns=(1, 1))
    open_bundle(copy)
    assert sorted(hashed) == first


def test_a_read_only_bundle_runs_without_a_cache(copy, monkeypatch, tmp_path):
    before = sorted(copy.rglob("*"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "file"))
    for path in [*copy.iterdir(), copy]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        assert 0 <= Session(open_bundle(copy), 1).prefill([1, 2, 3]) < 32
        assert sorted(copy.rglob("*")) == before
    finally:
        copy.chmod(0o755)


def test_a_bundle_for_another_cpu_is_refused_but_can_be_inspected(copy):
    rewrite(copy, lambda m: m["target"].update(features=[*m["target"]["features"], "avx512zz"], cpu="Other CPU"))
    said = refusal(copy)
    assert "Other CPU" in said and "lacks avx512zz" in said and "--target" in said
    assert open_bundle(copy, run=False).manifest.target.cpu == "Other CPU"
    rewrite(copy, set_at("target", "arch", "sparc"))
    assert "is compiled for sparc and this machine is" in refusal(copy)


def test_a_bundle_that_needs_matrix_tiles_is_refused_where_the_system_keeps_them(copy, monkeypatch):
    rewrite(copy, lambda m: m["target"].update(features=[TILES], name="sapphirerapids"))
    monkeypatch.setattr(bundle, "missing_features", lambda target: ())
    monkeypatch.setattr(bundle, "host_arch", lambda: open_bundle(copy, run=False).manifest.target.arch)
    monkeypatch.setattr(bundle, "tiles_given", lambda: False)
    assert re.search(r"sapphirerapids.*tiles of AMX.*--target x86-64-v4-bf16", refusal(copy))
    monkeypatch.setattr(bundle, "tiles_given", lambda: True)
    open_bundle(copy)


def test_a_bundle_of_another_iree_is_refused(copy):
    rewrite(copy, set_at("versions", "iree", "3.99.1"))
    said = refusal(copy)
    assert "compiled by IREE 3.99.1" in said and "iree-base-runtime==3.99.*" in said


def test_a_bundle_whose_program_has_other_functions_is_refused(copy, tmp_path, compile_cache):
    other = toy_bundle.write(tmp_path / "other", CONTEXT, (4,), cache_dir=compile_cache).path
    files = json.loads((other / "manifest.json").read_text())["files"]
    shutil.copy(other / MODEL, copy / MODEL)
    rewrite(copy, set_at("files", MODEL, files[MODEL]))
    with pytest.raises(BundleError, match="has no function prefill_8"):
        Session(open_bundle(copy), 1)


def write(directory, **files):
    with BundleWriter(directory) as writer:
        for name, data in {MODEL: b"m", WEIGHTS: b"w", **files}.items():
            writer.write(name, data)
        return writer.commit(toy_bundle.manifest(CONTEXT, WIDTHS))


def test_optional_files_are_found_again(tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "{}", "chat_template.jinja": "ä"})
    opened = open_bundle(tmp_path / "b")
    assert str(opened.tokenizer) == str(tmp_path / "b" / TOKENIZER) and opened.chat_template == "ä"


def test_a_failure_leaves_nothing_and_the_old_bundle(tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "old"})
    for error in (RuntimeError, KeyboardInterrupt):
        with pytest.raises(error), BundleWriter(tmp_path / "b") as writer:
            writer.write(MODEL, b"new")
            raise error
    with BundleWriter(tmp_path / "b") as writer:
        writer.write(MODEL, b"never committed")
    assert os.listdir(tmp_path) == ["b"]
    assert open_bundle(tmp_path / "b").tokenizer.read_bytes() == b"old"


def test_the_old_bundle_comes_back_if_the_new_one_cannot_take_its_place(tmp_path, monkeypatch):
    write(tmp_path / "b", **{TOKENIZER: "old"})
    rename = os.rename

    def fail(source, target):
        if ".castiron-" in str(source) and not target.exists():
            raise OSError(errno.EIO, "no", source)
        rename(source, target)

    # As on a file system that does not exchange names.
    monkeypatch.setattr(aside, "_exchange", lambda *_: False)
    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(BundleError, match="b cannot be written: no"):
        write(tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"]
    assert open_bundle(tmp_path / "b").tokenizer.read_bytes() == b"old"


def test_an_incomplete_or_wrong_bundle_is_not_committed(tmp_path):
    with pytest.raises(BundleError, match="would lack weights.irpa"), BundleWriter(tmp_path / "b") as writer:
        writer.write(MODEL, b"m")
        writer.commit(toy_bundle.manifest(CONTEXT, WIDTHS))
    with pytest.raises(BundleError, match="does not hold together: vocab"), BundleWriter(tmp_path / "b") as writer:
        writer.write(MODEL, b"m")
        writer.write(WEIGHTS, b"w")
        writer.commit(dataclasses.replace(toy_bundle.manifest(CONTEXT, WIDTHS), vocab=-1))
    assert os.listdir(tmp_path) == []


def test_a_new_bundle_replaces_all_of_the_old(tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "old"})
    write(tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"] and not (tmp_path / "b" / TOKENIZER).exists()


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_bundle_that_came_meanwhile_is_replaced(exchanges, tmp_path, monkeypatch):
    if not exchanges:
        monkeypatch.setattr(aside, "_exchange", lambda *_: False)
    write(tmp_path / "b", **{TOKENIZER: "another's"})
    exists = Path.exists
    # The other came after a look.
    monkeypatch.setattr(Path, "exists", lambda path: path != tmp_path / "b" and exists(path))
    write(tmp_path / "b")
    assert os.listdir(tmp_path) == ["b"] and not (tmp_path / "b" / TOKENIZER).exists()


def test_only_bundles_and_empty_directories_are_replaced(tmp_path):
    place = tmp_path / "b"
    place.mkdir()
    write(place)
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(BundleError, match="holds other things than a bundle"), BundleWriter(place):
        pass
    assert (place / "thesis.txt").read_text() == "years of work" and os.listdir(tmp_path) == ["b"]
    for name, text in (("manifest.json", "{}"), ("manifest.json", "no json"), ("model.vmfb", "")):
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        other.mkdir()
        (other / name).write_text(text)
        with pytest.raises(BundleError, match="holds other things"), BundleWriter(other):
            pass
        assert (other / name).read_text() == text
    (tmp_path / "file").write_text("x")
    with pytest.raises(BundleError, match="is a file"), BundleWriter(tmp_path / "file"):
        pass
    with pytest.raises(BundleError, match="cannot be written"), BundleWriter(tmp_path / "file" / "b"):
        pass


def test_what_a_killed_writer_left_is_put_right(tmp_path):
    write(tmp_path / "b", **{TOKENIZER: "good"})
    os.rename(tmp_path / "b", tmp_path / ".b.before")
    (tmp_path / ".b.castiron-0123abcd").mkdir()
    with BundleWriter(tmp_path / "b") as alive:
        with BundleWriter(tmp_path / "b"):
            assert alive.directory.is_dir()
        assert sorted(os.listdir(tmp_path)) == [alive.directory.name, "b"]
    assert open_bundle(tmp_path / "b").tokenizer.read_bytes() == b"good"


def test_every_file_name_is_known(tmp_path):
    with BundleWriter(tmp_path / "b") as writer, pytest.raises(ValueError, match="not a file of a bundle"):
        writer.write("../escape", b"")
    assert all(os.path.basename(name) == name for name in FILES)


def test_the_manifest_is_plain_json(toy_dir):
    manifest = open_bundle(toy_dir).manifest
    assert json.loads((toy_dir / "manifest.json").read_text()) == to_json(manifest)
