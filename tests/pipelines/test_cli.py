"""The command line as a user meets it: what it prints where, how it ends, and what it does not load."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.emitter import models
from castiron.pipelines import cli
from castiron.pipelines.checkpoints.gguf_architectures import ARCHITECTURES
from castiron.pipelines.checkpoints.gguf_file import CODEC_OF_GGML_TYPE
from castiron.pipelines.checkpoints.text_part import TEXT_PARTS
from castiron.pipelines.commands import generating
from castiron.pipelines.commands import run as run_command
from tests.pipelines import toy_text
from tests.pipelines.toy_text import CONTEXT, EOS, read_json


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "toy"))


@pytest.fixture(scope="module")
def bare_bundle(tmp_path_factory):
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "bare", text=False))


def castiron(*argv: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def complaint(capsys) -> str:
    """The one sentence on stderr; fails for more lines, for a traceback, or for anything on stdout."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("castiron: ") and err.count("\n") == 1, (out, err)
    return err


def test_run_streams_text_and_tells_the_speed_on_stderr(bundle):
    done = castiron("run", bundle, "-p", "abc", "-n", "5", "--ignore-eos")
    assert done.returncode == 0, done.stderr
    as_json = castiron("run", bundle, "-p", "abc", "-n", "5", "--ignore-eos", "--json")
    assert done.stdout == json.loads(as_json.stdout)["text"] + "\n"
    assert "tok/s" in done.stderr and as_json.stderr == ""


def test_json_is_one_object_with_the_tokens(bundle, bare_bundle, capsys):
    found = []
    for directory in (bundle, bare_bundle):
        assert cli.main(["run", directory, "--tokens", "1,2,3", "-n", "6", "--ignore-eos", "--json"]) == 0
        found.append(read_json(capsys.readouterr().out))
    with_text, bare = found
    assert with_text["tokens"] == bare["tokens"] and len(bare["tokens"]) == 6
    assert bare["text"] is None and with_text["text"] == toy_text.tokenizer().decode(bare["tokens"])
    assert set(bare) == {"tokens", "text", "thoughts", "prompt_tokens", "cached_tokens", "finish_reason", "prefill_tok_s",
                         "decode_tok_s", "ttft_ms", "load_s", "peak_rss_mb", "speculation"}  # fmt: skip
    assert bare["prompt_tokens"] == 3 and bare["finish_reason"] == "length" and bare["decode_tok_s"] > 0


def test_eos_ends_the_text_unless_ignored(bundle, capsys):
    def tokens(*more):
        assert cli.main(["run", bundle, "--tokens", "1", "--json", *more]) == 0
        result = read_json(capsys.readouterr().out)
        return result["tokens"], result["finish_reason"]

    everything, reason = tokens("--ignore-eos")
    assert reason == "context" and len(everything) == CONTEXT and EOS in everything
    assert tokens() == (everything[: everything.index(EOS)], "stop")


def test_without_a_number_an_answer_has_a_usual_length(bundle, monkeypatch, capsys):
    """Which gives way to the end of the context; -n -1 knows only that."""
    monkeypatch.setattr(generating, "USUAL_TOKENS", 5)

    def run(*more):
        assert cli.main(["run", bundle, "--tokens", ",".join(["1"] * 10), "--ignore-eos", *more]) == 0
        return capsys.readouterr()

    last = run().err.splitlines()[-1]
    assert "stopped at 5 tokens" in last and "-n -1" in last
    result = read_json(run("--json").out)
    assert len(result["tokens"]) == 5 and result["finish_reason"] == "length"
    assert "stopped at" not in run("-n", "5").err
    for more, usual in ((["-n", "-1"], 5), ([], 16)):
        monkeypatch.setattr(generating, "USUAL_TOKENS", usual)
        result = read_json(run("--json", *more).out)
        assert len(result["tokens"]) == CONTEXT - 10 + 1 and result["finish_reason"] == "context"
        assert "the context is full" in run(*more).err


def test_the_usual_length_is_said_in_the_help(capsys):
    for command in ("run", "chat"):
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        assert "default: 1024" in " ".join(capsys.readouterr().out.split())


def test_the_prompt_comes_from_an_option_a_file_or_stdin(bundle, tmp_path):
    (tmp_path / "prompt").write_text("abc", encoding="utf-8")
    ways = ((["-p", "abc"], ""), (["-f", str(tmp_path / "prompt")], "de"), (["-p", "-"], "abc"), ([], "abc"))
    outputs = {castiron("run", bundle, *way, "-n", "4", input=data).stdout for way, data in ways}
    assert len(outputs) == 1


def test_chat_template_system_and_raw(bundle, capsys):
    def prompt_tokens(*argv):
        assert cli.main(["run", bundle, "-n", "1", "--ignore-eos", "--json", "-p", *argv]) == 0
        return read_json(capsys.readouterr().out)["prompt_tokens"]

    assert prompt_tokens("bc", "--raw") == 2
    assert prompt_tokens("bc") == len("ubca")
    assert prompt_tokens("bc", "--system", "de") == len("sdeubca")


def test_seeds(bundle, capsys):
    def text(*argv):
        cli.main(["run", bundle, "--tokens", "1,2", "-n", "12", "--ignore-eos", "--json", "--temperature", "2", *argv])
        return read_json(capsys.readouterr().out)["text"]

    assert text("--seed", "4") == text("--seed", "4") != text("--seed", "5")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["run", "/no/such", "-p", "x"], "castiron compile"),
        (["run", "BUNDLE", "--tokens", "1,99"], "vocabulary of 32"),
        (["run", "BUNDLE", "--tokens", "1", "-n", "25"], "at most 24"),
        (["run", "BUNDLE", "--tokens", "1", "-n", "0"], "-n is 0"),
        (["run", "BARE", "--tokens", "1", "--stop", "a"], "--stop"),
        (["run", "BUNDLE", "--tokens", ",".join(["1"] * 25)], "25 tokens"),
        (["run", "BUNDLE", "--tokens", "1", "--system", "x"], "--system"),
        (["run", "BUNDLE", "-p", "x", "--raw", "--system", "y"], "--system"),
        (["run", "BUNDLE", "-p", "x", "--temperature", "-1"], "temperature"),
        (["run", "BUNDLE", "-p", "x", "--threads", "0"], "threads"),
        (["run", "BUNDLE", "-f", "/no/such"], "/no/such: No such file"),
        (["run", "BARE", "-p", "x"], "--tokens"),
        (["verify", "BUNDLE", "-n", "0"], "at least 1"),
        (["verify", "BUNDLE", "--prompts", "/no/such"], "/no/such: No such file"),
        (["verify", "BUNDLE", "-n", "3"], "--checkpoint"),
        (["bench", "BUNDLE", "--depth", "20", "--prompt", "4", "--gen", "8"], "--depth"),
        (["bench", "BUNDLE", "--rounds", "0"], "--rounds"),
        (["compile", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["inspect", "/no/such/model.gguf"], "/no/such/model.gguf"),
        (["emit", "/no/such/model.gguf"], "/no/such/model.gguf"),
    ],
)
def test_an_error_is_one_sentence_and_exit_status_1(bundle, bare_bundle, argv, says, capsys):
    places = {"BUNDLE": bundle, "BARE": bare_bundle}
    assert cli.main([places.get(word, word) for word in argv]) == 1
    assert says in complaint(capsys)


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["run"], ["run", "x", "--tokens", "1,b"], ["run", "x", "-p", "a", "--bogus"],
             ["run", "x", "-p", "a", "--tokens", "1"], ["bench", "x", "--against", "vllm"], ["compile", "x", "--weights", "q9"]]
)  # fmt: skip
def test_wrong_usage_is_exit_status_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    assert stop.value.code == 2 and "usage: castiron" in capsys.readouterr().err


def test_a_bug_of_ours_keeps_its_traceback(bundle, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(run_command, "read_prompt", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", bundle, "-p", "a"])


def test_an_interrupt_is_exit_status_130(bundle, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "read_prompt", interrupted)
    assert cli.main(["run", bundle, "-p", "a"]) == 130
    assert "interrupted" in complaint(capsys)


def test_a_reader_that_leaves_ends_the_command_quietly(bundle):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "castiron", "run", bundle, "-p", "abc", "--ignore-eos"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(write)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "Broken" not in done.stderr


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_names_every_option_and_shows_examples(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and f"  castiron {command} " in text
    # chat and serve talk, completion is a script, the others have a result.
    assert "--json" in text or command in ("chat", "serve", "completion")


def test_run_loads_nothing_that_it_does_not_use(bundle):
    code = (
        "import sys; from castiron.pipelines.cli import main; status = main(sys.argv[1:])\n"
        "print(status, sorted(m for m in sys.modules if m in "
        "('torch', 'transformers', 'iree.compiler', 'jinja2', 'gguf', 'email', 'castiron.emitter', "
        "'castiron.pipelines.checkpoints', 'castiron.pipelines.casting.cast')))"
    )
    command = [sys.executable, "-c", code, "run", bundle, "--tokens", "1,2", "-n", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_inspect_lists_what_is_read_and_so_does_the_readme(capsys):
    """Every family that there is a file of, and every architecture and type of GGUF files."""
    families = {path.stem for path in Path(models.__file__).parent.glob("*.py") if "\ndef forward(" in path.read_text()}
    assert cli.main(["inspect", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts["families"]) | set(facts["encoders"]) == families
    assert set(facts["gguf_architectures"]) == {name.partition(" ")[0] for name in ARCHITECTURES}
    assert set(facts["gguf_types"]) == {codec.upper() for codec in CODEC_OF_GGML_TYPE.values()}
    assert set(facts["text_parts"]) == set(TEXT_PARTS)
    assert cli.main(["inspect"]) == 0
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    listed, told = (set(re.findall(r"[\w-]+", text)) for text in (capsys.readouterr().out, readme))
    everywhere = families | set(facts["text_parts"]) | set(facts["gguf_types"])
    assert (everywhere | set(facts["gguf_architectures"])) - listed == set() == everywhere - told


def test_inspect_describes_bundles_and_the_catalogue(bundle, bare_bundle, capsys):
    assert cli.main(["inspect", bundle, "--json"]) == 0
    assert read_json(capsys.readouterr().out)["context"] == CONTEXT
    assert cli.main(["inspect", bare_bundle]) == 0
    assert "takes token ids only" in capsys.readouterr().out
    assert cli.main(["inspect", "--json"]) == 0
    assert {"smollm2-135m-instruct"} <= {m["name"] for m in read_json(capsys.readouterr().out)["catalogue"]}


PROGRESS = """
import time
from castiron.pipelines import progress as drawing
drawing.PATIENCE = drawing.INTERVAL = 0.02
def until_drawn():
    while progress.shown and not progress._drawn:
        time.sleep(0.01)
with drawing.Progress() as progress:
    progress('melting', 0.5)
    until_drawn()
    progress.print('a result')
    progress('casting', 0.0)
    until_drawn()
print('done')
"""


def test_progress_is_a_bar_at_a_terminal_that_goes_when_the_work_is_done():
    """stderr is a terminal here and stdout is a pipe."""
    terminal, inside = os.openpty()
    done = subprocess.run([sys.executable, "-c", PROGRESS], stdout=subprocess.PIPE, stderr=inside, text=True, check=True)
    os.close(inside)
    shown = os.read(terminal, 1 << 16).decode()
    os.close(terminal)
    assert done.stdout == "a result\ndone\n"
    assert re.search(r"melting +\[#+\.+\]  50%", shown) and re.search(r"casting +\d+ s", shown) and "\n" not in shown
    # The last thing that happens to the line is that it is wiped.
    assert shown.endswith("\r\x1b[K") and "100%" not in shown


def test_without_a_terminal_progress_is_quiet():
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a result\ndone\n", "")


def test_what_is_over_at_once_is_not_drawn():
    code = "from castiron.pipelines.progress import Progress\nwith Progress() as progress: progress('melting', 0.5)"
    terminal, inside = os.openpty()
    subprocess.run([sys.executable, "-c", code], stderr=inside, check=True)
    os.write(inside, b"end")
    os.close(inside)
    shown = os.read(terminal, 1 << 16)
    os.close(terminal)
    assert shown == b"end"


def test_text_is_utf_8_whatever_the_locale_says(bundle):
    said = ["run", bundle, "--tokens", "1", "-n", "20", "--ignore-eos", "--temperature", "50", "--seed", "3"]
    for more in ([], ["--json"]):
        here = castiron(*said, *more, encoding="utf-8")
        there = castiron(*said, *more, encoding="utf-8", env={**os.environ, "PYTHONIOENCODING": "ascii"})
        texts = [json.loads(done.stdout)["text"] if more else done.stdout for done in (here, there)]
        assert not texts[0].isascii() and texts[0] == texts[1], there.stderr


def test_names_that_are_no_text_and_descriptors_that_are_closed(bundle, tmp_path):
    """JSON has the bytes of a name as escapes; what was closed takes nothing, and no other file has its number."""
    alien = os.fsencode(tmp_path) + b"/n\xff\n"
    os.symlink(bundle, alien)
    listed = castiron("list", os.fsdecode(alien), "--json")
    assert listed.returncode == 0 and json.loads(listed.stdout)["bundles"][-1]["path"] == os.fsdecode(alien)
    refused = castiron("inspect", os.fsdecode(alien) + "x", "--json")
    assert refused.returncode == 1 and "n\udcff" in json.loads(refused.stdout)["error"]["message"]
    command = [sys.executable, "-m", "castiron", "run", bundle, "a", "-n", "1"]
    full = subprocess.run([*command, "--json"], stdout=open("/dev/full", "w"), stderr=subprocess.PIPE, text=True, timeout=60)
    assert full.returncode == 1 and full.stderr.startswith("castiron: stdout: No space left on device")
    assert full.stderr.count("\n") == 1
    for closed in ("<&-", ">&-", "2>&-", "<&- >&- 2>&-"):
        done = subprocess.run(["sh", "-c", f'exec "$0" "$@" {closed}', *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "Traceback" not in done.stderr
        assert bool(done.stdout) == (" >&-" not in f" {closed}"), closed
        assert ("castiron: prompt 3 tokens" in done.stderr) == ("2>&-" not in closed), closed
