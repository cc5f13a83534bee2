"""What a prompt is made of: arguments, stdin, files; and the bundle that answers it, by path or by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.pipelines import cli
from castiron.pipelines.casting import compile as casting
from castiron.pipelines.casting.cast import cached_place
from castiron.pipelines.casting.compile import Options
from castiron.pipelines.checkpoints import open_checkpoint
from castiron.pipelines.checkpoints.catalogue import CATALOGUE
from castiron.reference import tiny
from tests.pipelines import served, toy_text
from tests.pipelines.toy_text import read_json

BOM = b"\xef\xbb\xbf"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "toy"))


def ask(bundle: str, *argv: str, data: bytes | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", "run", bundle, *argv, "-n", "1", "--ignore-eos", "--json"]
    stdin = {"stdin": subprocess.DEVNULL} if data is None else {"input": data}
    return subprocess.run(command, capture_output=True, timeout=120, check=False, **stdin)


def size(done: subprocess.CompletedProcess) -> int:
    """Tokens of the prompt, one a character and two of the template."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["prompt_tokens"] - 2


def test_a_document_on_stdin_comes_after_the_prompt_with_an_empty_line_between(bundle):
    assert size(ask(bundle, "-p", "abc", data=b"defg")) == len("abc\n\ndefg") == size(ask(bundle, "abc", data=b"defg"))
    assert size(ask(bundle, "-p", "abc", data=b"")) == size(ask(bundle, "-p", "abc")) == 3
    assert size(ask(bundle, "-p", "-", data=b"defg")) == size(ask(bundle, data=b"defg")) == 4
    raw = ask(bundle, "-p", "abc", "--raw", data=b"defg")
    assert json.loads(raw.stdout)["prompt_tokens"] == len("abc\n\ndefg")


def test_stdin_is_not_read_where_a_file_or_ids_are_the_prompt(bundle, tmp_path):
    (tmp_path / "prompt").write_text("abc")
    assert size(ask(bundle, "-f", str(tmp_path / "prompt"), data=b"defg")) == 3
    assert size(ask(bundle, "--tokens", "1,2,3", data=b"defg")) == 1


def test_a_byte_order_mark_is_no_part_of_the_prompt(bundle, tmp_path):
    (tmp_path / "prompt").write_bytes(BOM + b"abc")
    assert size(ask(bundle, "-f", str(tmp_path / "prompt"))) == size(ask(bundle, data=BOM + b"abc")) == 3


@pytest.mark.parametrize("argv", [["-p", ""], ["-p", " \n"], [""], [], ["-p", "-"], ["-p", "", "--raw"], ["-f", "EMPTY"]])
def test_an_empty_prompt_is_one_sentence(bundle, argv, tmp_path):
    (tmp_path / "empty").write_bytes(BOM + b"\n")
    done = ask(bundle, *[word.replace("EMPTY", str(tmp_path / "empty")) for word in argv])
    sentence = done.stderr.decode()
    assert done.returncode == 1 and "is empty" in sentence and sentence.count("\n") == 1


def test_a_stdin_that_nobody_closes_is_named(bundle):
    command = [sys.executable, "-m", "castiron", "run", bundle, "-p", "abc", "-n", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert "/dev/null" in process.stderr.readline()
        process.stdin.close()
        assert process.wait(60) == 0


def test_words_are_the_prompt_wherever_the_options_stand(bundle, capsys):
    """And the subcommand's own usage is shown for what it does not know."""

    def tokens(*argv: str) -> int:
        assert cli.main(["run", *argv, "--ignore-eos", "--json"]) == 0
        return read_json(capsys.readouterr().out)["prompt_tokens"] - 2

    for argv in ([bundle, "abc de", "-n", "1"], [bundle, "-n", "1", "abc de"], ["-n", "1", bundle, "abc", "de"],
                 [bundle, "abc", "-n", "1", "de"]):  # fmt: skip
        assert tokens(*argv) == len("abc de"), argv


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "x", "a", "--bogus"], "--bogus"),
        (["chat", "x", "y"], "y"),
        (["serve", "x", "--ports", "1"], "--ports"),
        (["run", "x", "a", "-p", "b"], "PROMPT (a): not allowed with -p"),
    ],
)
def test_wrong_usage_shows_the_commands_own_usage(argv, says, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    errors = capsys.readouterr().err
    assert stop.value.code == 2 and errors.startswith(f"usage: castiron {argv[0]} ") and says in errors.splitlines()[-1]


@pytest.fixture
def checkpoint(tmp_path, own_cache) -> Path:
    """A small one, and a cache that has nothing of it yet."""
    place = tiny.tiny_model("llama", tmp_path / "models" / "tiny")
    served.tokenizer().save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"chat_template": served.TEMPLATE, "eos_token": "</s>"}))
    return place


def test_a_checkpoint_is_cast_once_and_run(checkpoint, tmp_path, capsys):
    argv = ["run", str(checkpoint), "Hello there", "-n", "5", "--ignore-eos", "--json"]
    assert cli.main(argv) == 0
    first = capsys.readouterr()
    (place,) = (tmp_path / "cache" / "bundles").iterdir()
    assert place.name.startswith("tiny-") and f"casting {checkpoint}" in first.err
    assert cli.main(argv) == 0
    again = capsys.readouterr()
    assert read_json(again.out)["tokens"] == read_json(first.out)["tokens"] and "casting" not in again.err
    # Half of it cleared away, it is cast again.
    (place / "manifest.json").unlink()
    assert cli.main(argv) == 0 and "casting" in capsys.readouterr().err
    # Another checkpoint of this name has a place of its own.
    assert cached_place("/elsewhere/tiny", Options()).name != place.name


def test_a_name_of_the_catalogue_is_fetched_and_cast(checkpoint, tmp_path, monkeypatch, capsys):
    asked = []

    def opened(model, *more):
        asked.append(model)
        return open_checkpoint(checkpoint)

    monkeypatch.setattr(casting, "open_checkpoint", opened)
    monkeypatch.chdir(tmp_path)
    name = next(iter(CATALOGUE))
    assert cli.main(["run", name, "hi", "-n", "2", "--ignore-eos", "--json"]) == 0
    (made,) = (tmp_path / "cache" / "bundles").iterdir()
    assert asked == [name] and made.name.startswith(name) and (made / "manifest.json").exists()
    assert read_json(capsys.readouterr().out)["tokens"]


def test_a_place_that_is_nothing_names_what_there_is(tmp_path, capsys):
    for command in ("run", "chat", "serve"):
        assert cli.main([command, "smollm2-135", *(["hi"] if command == "run" else ["--threads", "1"])]) == 1
        error = capsys.readouterr().err
        assert "smollm2-135m-instruct" in error and "castiron compile" in error and error.count("\n") == 1
