"""A packed bundle runs in place like its directory, and is rejected if it is damaged."""

from __future__ import annotations

import shutil
import struct
import zipfile

import pytest

from castiron.vmfb.bundle.archive import ALIGNMENT, open_archive
from castiron.vmfb.bundle.bundle import open_bundle, pack_bundle
from castiron.vmfb.bundle.manifest import MODEL, WEIGHTS, BundleError
from castiron.vmfb.run.session import Session
from tests.vmfb.hostile_bundles import flip_byte, rejection


@pytest.fixture
def packed(toy_dir, tmp_path):
    out = tmp_path / "toy.castiron"
    pack_bundle(open_bundle(toy_dir), out)
    return out


def test_a_packed_bundle_gives_the_logits_of_its_directory(toy_dir, packed):
    directory, archive_session = Session(open_bundle(toy_dir), 1), Session(open_bundle(packed), 1)
    for session in (directory, archive_session):
        session.prefill([1, 2, 3, 4, 5])
        session.step(7)
    assert (directory.logits() == archive_session.logits()).all()
    assert open_bundle(packed).manifest == open_bundle(toy_dir).manifest


def test_every_part_is_stored_unchanged_on_a_page(toy_dir, packed):
    parts = open_archive(packed)
    assert set(parts) == {path.name for path in toy_dir.iterdir()}
    for name, part in parts.items():
        assert part.offset % ALIGNMENT == 0
        assert part.read_bytes() == bytes(part.map()) == (toy_dir / name).read_bytes()


def test_unzip_and_packing_again_change_nothing(toy_dir, packed, tmp_path):
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(tmp_path / "out")
    assert open_bundle(tmp_path / "out", full_check=True).manifest == open_bundle(toy_dir).manifest
    pack_bundle(open_bundle(packed), tmp_path / "again.castiron")
    assert (tmp_path / "again.castiron").read_bytes() == packed.read_bytes()


def test_rejects_a_changed_byte_of_any_part(packed, tmp_path):
    for name, part in open_archive(packed).items():
        damaged = shutil.copy(packed, tmp_path / f"{name}.castiron")
        flip_byte(damaged, part.offset + part.size // 2)
        assert name == "manifest.json" or "sha256" in rejection(damaged)


def test_rejects_truncated_archives_and_other_files(packed, tmp_path):
    data = packed.read_bytes()
    other = tmp_path / "other.castiron"
    for size in (0, 1, 100, len(data) // 2, len(data) - 1):
        other.write_bytes(data[:size])
        assert "not a packed bundle" in rejection(other)
    for name, compression in ((MODEL, zipfile.ZIP_DEFLATED), ("evil", zipfile.ZIP_STORED), ("../evil", zipfile.ZIP_STORED)):
        with zipfile.ZipFile(other, "w", compression) as archive:
            archive.writestr(name, b"x" * 100)
        assert "not a packed bundle" in rejection(other)


def test_a_damaged_bundle_is_not_packed(toy_dir, tmp_path):
    opened = open_bundle(shutil.copytree(toy_dir, tmp_path / "bundle"))
    flip_byte(tmp_path / "bundle" / WEIGHTS)
    (tmp_path / "out").mkdir()
    with pytest.raises(BundleError, match="sha256"):
        pack_bundle(opened, tmp_path / "out" / "x.castiron")
    assert not list((tmp_path / "out").iterdir())
    with pytest.raises(BundleError, match="is a directory"):
        pack_bundle(open_bundle(toy_dir), tmp_path / "out")


def test_iree_tools_need_a_directory(toy_dir, packed):
    assert open_bundle(toy_dir).file(MODEL) == toy_dir / MODEL
    with pytest.raises(BundleError, match="unzip it into a directory"):
        open_bundle(packed).file(MODEL)


def test_rejects_a_huge_archive_directory(tmp_path):
    """The file is sparse and uses no space."""
    out, size = tmp_path / "x.castiron", 10**10
    with open(out, "wb") as file:
        file.write(b"PK\3\4")
        file.seek(size)
        file.write(b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1, 1, size - 4, 4))
        file.write(b"PK\6\7" + struct.pack("<IQI", 0, size, 1))
        file.write(b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 2**16 - 1, 2**16 - 1, 2**32 - 1, 2**32 - 1, 0))
    assert f"its zip directory is {size - 4} bytes; the limit is 1000000" in rejection(out)
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("\x1b[2J\n" * 5000, b"")
    assert len(message := rejection(out)) < 300 + len(str(out)) and message.isprintable()
