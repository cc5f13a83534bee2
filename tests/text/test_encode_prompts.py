"""The prompt of `castiron run`: arguments, stdin, files; and its bundle, by path or by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.pipelines.checkpoints.catalogue import CATALOGUE
from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli import run
from castiron.pipelines.compile import compile_model
from tests.support import served, toy_text
from tests.support.toy_text import read_json

bundle = toy_text.bundle
BOM = b"\xef\xbb\xbf"


@pytest.fixture
def ask(bundle, tmp_path, monkeypatch, capsys):
    """Return a function that runs `castiron run` with `data` on stdin, for status and output."""

    def run_command(*argv: str, data: bytes = b"") -> tuple[int, str, str]:
        (tmp_path / "stdin").write_bytes(data)
        with open(tmp_path / "stdin", "rb") as file:
            monkeypatch.setattr(run, "STDIN", file.fileno())
            status = cli.main(["run", bundle, *argv, "-n", "1", "--ignore-eos", "--json"])
        return status, *capsys.readouterr()

    return run_command


@pytest.fixture
def size(ask):
    """Return a function that returns the prompt's tokens, one a character, without the template."""

    def prompt_tokens(*argv: str, data: bytes = b"") -> int:
        status, output, errors = ask(*argv, data=data)
        assert status == 0, errors
        return json.loads(output)["prompt_tokens"] - 2 * ("--raw" not in argv)

    return prompt_tokens


def test_a_document_on_stdin_comes_after_the_prompt_with_an_empty_line_between(size):
    assert size("-p", "abc", data=b"defg") == len("abc\n\ndefg") == size("abc", data=b"defg")
    assert size("-p", "abc") == 3
    assert size("-p", "-", data=b"defg") == size(data=b"defg") == 4
    assert size("-p", "abc", "--raw", data=b"defg") == len("abc\n\ndefg")


def test_stdin_is_not_read_where_a_file_or_ids_are_the_prompt(size, tmp_path):
    (tmp_path / "prompt").write_text("abc")
    assert size("-f", str(tmp_path / "prompt"), data=b"defg") == 3
    assert size("--tokens", "1,2,3", data=b"defg") == 1


def test_a_byte_order_mark_is_no_part_of_the_prompt(size, tmp_path):
    (tmp_path / "prompt").write_bytes(BOM + b"abc")
    assert size("-f", str(tmp_path / "prompt")) == size(data=BOM + b"abc") == 3


@pytest.mark.parametrize("argv", [["-p", ""], ["-p", " \n"], [""], [], ["-p", "-"], ["-p", "", "--raw"], ["-f", "EMPTY"]])
def test_rejects_an_empty_prompt(ask, argv, tmp_path):
    (tmp_path / "empty").write_bytes(BOM + b"\n")
    status, _, errors = ask(*[word.replace("EMPTY", str(tmp_path / "empty")) for word in argv])
    assert status == 1 and "is empty" in errors and errors.count("\n") == 1


def test_reports_a_stdin_that_stays_open(bundle):
    command = [sys.executable, "-m", "castiron", "run", bundle, "-p", "abc", "-n", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "/dev/null" in process.stderr.readline()
        process.stdin.close()
        assert process.wait(60) == 0


def test_words_are_the_prompt_wherever_the_options_stand(bundle, capsys):
    def tokens(*argv: str) -> int:
        assert cli.main(["run", *argv, "--ignore-eos", "--json"]) == 0
        return read_json(capsys.readouterr().out)["prompt_tokens"] - 2

    for argv in ([bundle, "abc de", "-n", "1"], [bundle, "-n", "1", "abc de"], ["-n", "1", bundle, "abc", "de"],
                 [bundle, "abc", "-n", "1", "de"]):  # fmt: skip
        assert tokens(*argv) == len("abc de"), argv


@pytest.fixture
def checkpoint(tmp_path, own_cache) -> Path:
    """Write a small checkpoint; the cache does not have its bundle."""
    return served.checkpoint(tmp_path / "models" / "tiny")


def test_run_compiles_a_checkpoint_and_finds_it_cached(checkpoint, tmp_path, capsys):
    argv = ["run", str(checkpoint), "Hello there", "-n", "5", "--ignore-eos", "--json"]
    assert cli.main(argv) == 0
    first = capsys.readouterr()
    (folder,) = (path for path in (tmp_path / "cache" / "bundles").iterdir() if path.is_dir())
    assert folder.name.startswith("tiny-") and f"compiling {checkpoint}" in first.err
    assert cli.main(argv) == 0
    again = capsys.readouterr()
    assert read_json(again.out)["tokens"] == read_json(first.out)["tokens"] and "compiling" not in again.err


def test_run_fetches_and_compiles_a_catalogue_name(checkpoint, tmp_path, monkeypatch, capsys):
    asked = []

    def found(model, progress=None):
        asked.append(model)
        return checkpoint

    monkeypatch.setattr(compile_model, "find_checkpoint", found)
    monkeypatch.chdir(tmp_path)
    name = next(iter(CATALOGUE))
    assert cli.main(["run", name, "hi", "-n", "2", "--ignore-eos", "--json"]) == 0
    (made,) = (path for path in (tmp_path / "cache" / "bundles").iterdir() if path.is_dir())
    assert set(asked) == {name} and made.name.startswith(name) and (made / "manifest.json").exists()
    assert read_json(capsys.readouterr().out)["tokens"]
