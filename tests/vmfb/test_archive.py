"""A bundle in one file runs as its directory does, from where it lies, and is refused when it is not whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from castiron.vmfb.archive import ALIGNMENT, parts_of, write_archive
from castiron.vmfb.bundle import open_bundle, pack_bundle
from castiron.vmfb.cache import cache_root
from castiron.vmfb.manifest import MODEL, WEIGHTS, BundleError
from castiron.vmfb.profile import profile
from castiron.vmfb.session import Session
from castiron.vmfb.weights import write_irpa


@pytest.fixture
def packed(toy_dir, tmp_path):
    out = tmp_path / "toy.castiron"
    pack_bundle(open_bundle(toy_dir), out)
    return out


def refusal(path, **options) -> str:
    with pytest.raises(BundleError) as caught:
        open_bundle(path, **options)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    return str(caught.value)


def test_a_packed_bundle_runs_as_its_directory(toy_dir, packed):
    whole, one = Session(open_bundle(toy_dir), 1), Session(open_bundle(packed), 1)
    for session in (whole, one):
        session.prefill([1, 2, 3, 4, 5])
        session.step(7)
    assert (whole.logits() == one.logits()).all()
    assert open_bundle(packed).manifest == open_bundle(toy_dir).manifest


def test_every_part_lies_on_a_page_as_it_is(toy_dir, packed):
    parts = parts_of(packed)
    assert set(parts) == {path.name for path in toy_dir.iterdir()}
    for name, part in parts.items():
        assert part.offset % ALIGNMENT == 0
        assert part.read_bytes() == bytes(part.map()) == (toy_dir / name).read_bytes()


def test_a_common_unzip_gives_the_directory_back(toy_dir, packed, tmp_path):
    with zipfile.ZipFile(packed) as archive:
        assert archive.testzip() is None
        archive.extractall(tmp_path / "out")
    assert open_bundle(tmp_path / "out", full_check=True).manifest == open_bundle(toy_dir).manifest


def test_the_same_bundle_gives_the_same_bytes_and_can_be_packed_again(packed, tmp_path):
    again = tmp_path / "again.castiron"
    pack_bundle(open_bundle(packed), again)
    assert again.read_bytes() == packed.read_bytes()


def test_a_changed_byte_of_any_part_is_refused(packed, tmp_path):
    data = packed.read_bytes()
    for name, part in parts_of(packed).items():
        if name == "manifest.json":
            continue
        spoilt = tmp_path / f"{name}.castiron"
        spoilt.write_bytes(data)
        with open(spoilt, "r+b") as file:
            file.seek(part.offset + part.size // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        assert "sha256" in refusal(spoilt)


def test_cut_files_and_files_of_another_kind_are_refused(packed, tmp_path):
    data = packed.read_bytes()
    other = tmp_path / "other.castiron"
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        other.write_bytes(data[:size])
        assert "is not a packed bundle" in refusal(other)
    for name, compression in ((MODEL, zipfile.ZIP_DEFLATED), ("evil", zipfile.ZIP_STORED), ("../evil", zipfile.ZIP_STORED)):
        with zipfile.ZipFile(other, "w", compression) as archive:
            archive.writestr(name, b"x" * 100)
        assert "is not a packed bundle" in refusal(other)


def test_an_archive_without_a_part_of_its_manifest_is_refused(packed, tmp_path):
    parts = parts_of(packed)
    del parts[WEIGHTS]
    write_archive(parts, {}, tmp_path / "less.castiron")
    assert f"{WEIGHTS} is missing" in refusal(tmp_path / "less.castiron")


def test_a_spoilt_bundle_is_not_packed_and_nothing_is_left(toy_dir, tmp_path):
    spoilt = shutil.copytree(toy_dir, tmp_path / "bundle")
    opened = open_bundle(spoilt)
    data = bytearray((spoilt / WEIGHTS).read_bytes())
    data[-1] ^= 1
    (spoilt / WEIGHTS).write_bytes(data)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match="sha256"):
        pack_bundle(opened, tmp_path / "out" / "x.castiron")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(BundleError, match="is a directory"):
        pack_bundle(open_bundle(toy_dir), tmp_path / "out")


def test_tools_that_take_paths_get_copies_that_are_made_once(toy_dir, packed):
    copies = {name: open_bundle(packed).file(name) for name in (MODEL, WEIGHTS)}
    for name, copy in copies.items():
        assert copy.is_relative_to(cache_root() / "unpacked") and copy.name == name
        assert copy.read_bytes() == (toy_dir / name).read_bytes()
    before = copies[WEIGHTS].stat()
    again = open_bundle(packed).file(WEIGHTS)
    assert again == copies[WEIGHTS] and again.stat().st_ino == before.st_ino
    assert open_bundle(packed).tokenizer is None
    # One that is not whole is made again.
    again.write_bytes(b"half")
    assert open_bundle(packed).file(WEIGHTS).read_bytes() == (toy_dir / WEIGHTS).read_bytes()


def test_copies_unused_for_long_make_room(packed):
    old = cache_root() / "unpacked" / "0123" / MODEL
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    os.utime(old, (1, 1))
    open_bundle(packed).file(MODEL)
    assert not old.parent.exists()


def test_a_part_that_changed_is_not_unpacked(packed):
    opened = open_bundle(packed)
    with open(packed, "r+b") as file:
        file.seek(opened.part(WEIGHTS).offset + 1)
        file.write(b"\xff")
    with pytest.raises(BundleError, match="sha256"):
        opened.file(WEIGHTS)
    assert not [path for path in (cache_root() / "unpacked").rglob("*") if path.is_file()]


def test_a_packed_bundle_is_profiled_as_its_directory(toy_dir, packed):
    found = []
    for place in (toy_dir, packed):
        bundle = open_bundle(place)
        found.append(profile(bundle, bundle.manifest.function("decode"), position=3, threads=1, repeats=2))
    assert [{(d.name, d.calls) for d in one.dispatches} for one in found][0] == {(d.name, d.calls) for d in found[1].dispatches}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_weights_are_pages_of_the_file_and_not_a_copy(toy_dir, tmp_path):
    """200 MB of a weight that nothing uses: anonymous memory must not grow by them."""
    import dataclasses

    from castiron.vmfb.archive import Part
    from castiron.vmfb.manifest import File, dump
    from tests.vmfb import toy

    copy = shutil.copytree(toy_dir, tmp_path / "large")
    entries = {**toy.weights(), "large": np.zeros(200_000_000, np.uint8)}
    write_irpa(copy / WEIGHTS, [(name, a, (a.shape, a.dtype)) for name, a in entries.items()])
    manifest = open_bundle(toy_dir).manifest
    files = {**manifest.files, WEIGHTS: File((copy / WEIGHTS).stat().st_size, Part.of(copy / WEIGHTS).sha256())}
    (copy / "manifest.json").write_bytes(dump(dataclasses.replace(manifest, files=files)))
    out = tmp_path / "large.castiron"
    pack_bundle(open_bundle(copy), out)
    code = (
        "import sys; from castiron.vmfb.bundle import open_bundle; from castiron.vmfb.session import Session\n"
        "s = Session(open_bundle(sys.argv[1]), 1); s.prefill([1, 2, 3])\n"
        "print(open('/proc/self/status').read())"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True, cwd=root, check=True)
    anonymous = int(re.search(r"RssAnon:\s+(\d+) kB", done.stdout)[1]) / 1000
    assert anonymous < 120, json.dumps(done.stdout.splitlines()[-30:])


def test_a_directory_as_large_as_the_disk_is_not_read(tmp_path):
    """A file with a hole takes no room."""
    place, size = tmp_path / "x.castiron", 10**10
    with open(place, "wb") as file:
        file.write(b"PK\3\4")
        file.seek(size)
        file.write(b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, size - 4, 4))
        file.write(b"PK\6\7" + struct.pack("<IQI", 0, size, 1))
        file.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0))
    assert f"its directory has {size - 4} bytes" in refusal(place)
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("\x1b[2J\n" * 5000, b"")
    assert len(said := refusal(place)) < 300 + len(str(place)) and said.isprintable()
