"""Test the command line: its output, its exit status, and which modules it imports."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.emitter import models
from castiron.pipelines.checkpoints.gguf.gguf_file import CODEC_OF_GGML_TYPE
from castiron.pipelines.checkpoints.hf.tensor_layouts import TEXT_PARTS
from castiron.pipelines.cli import main as cli
from castiron.pipelines.cli import run as run_command
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine import request
from tests.support import toy_text
from tests.support.terminal import at_terminal
from tests.support.toy_text import CONTEXT, EOS, read_json

bundle = toy_text.bundle


@pytest.fixture(scope="module")
def bare_bundle(tmp_path_factory):
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "bare", text=False))


def castiron(*argv: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, **options)


def complaint(capsys) -> str:
    """Return the error line on stderr; fail for more lines and for anything on stdout."""
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("castiron: ") and err.count("\n") == 1, (out, err)
    return err


def test_run_streams_text_and_prints_the_speed_on_stderr(bundle):
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
    assert set(bare) == {"tokens", "text", "reasoning_content", "prompt_tokens", "cached_tokens", "finish_reason", "prefill_tok_s",
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


def test_an_answer_has_a_default_length_within_the_context(bundle, monkeypatch, capsys):
    """An answer without -n stops at the default length; with -n -1 or a large -n at the end of the context."""
    monkeypatch.setattr(request, "DEFAULT_MAX_TOKENS", 5)

    def run(*more):
        assert cli.main(["run", bundle, "--tokens", ",".join(["1"] * 10), "--ignore-eos", *more]) == 0
        return capsys.readouterr()

    for argv in ([], ["-n", "5"]):
        assert run(*argv).err.endswith("\ncastiron: stopped at 5 tokens; -n -1 for no limit\n")
    result = read_json(run("--json").out)
    assert len(result["tokens"]) == 5 and result["finish_reason"] == "length"
    for more, usual in ((["-n", "-1"], 5), (["-n", "16"], 5), ([], 16)):
        monkeypatch.setattr(request, "DEFAULT_MAX_TOKENS", usual)
        result = read_json(run("--json", *more).out)
        assert len(result["tokens"]) == CONTEXT - 10 + 1 and result["finish_reason"] == "context"
        assert "the context is full" in run(*more).err


def test_chat_template_system_and_raw(bundle, capsys):
    def prompt_tokens(*argv):
        assert cli.main(["run", bundle, "-n", "1", "--ignore-eos", "--json", "-p", *argv]) == 0
        return read_json(capsys.readouterr().out)["prompt_tokens"]

    assert prompt_tokens("bc", "--raw") == 2
    assert prompt_tokens("bc") == len("ubca")
    assert prompt_tokens("bc", "--system", "de") == len("sdeubca")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["run", "BUNDLE", "--tokens", "1,99"], "give ids from 0 to 31"),
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
    ],
)
def test_an_error_is_one_line_and_exit_status_1(bundle, bare_bundle, argv, message, capsys):
    locations = {"BUNDLE": bundle, "BARE": bare_bundle}
    assert cli.main([locations.get(word, word) for word in argv]) == 1
    assert message in complaint(capsys)


FAULTY = ("missing", "junk.gguf", "adapter", "unsupported", "weightless")


@pytest.fixture
def faulty(tmp_path, monkeypatch):
    """Fill the current directory with paths that users mistake for models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "junk.gguf").write_bytes(b"junk")
    for name, file, text in (
        ("adapter", "adapter_config.json", '{"base_model_name_or_path": "org/base"}'),
        ("unsupported", "config.json", '{"model_type": "abacus"}'),
        ("weightless", "config.json", '{"model_type": "llama"}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)


@pytest.mark.parametrize("model", FAULTY)
def test_a_faulty_model_has_one_message_in_every_command(faulty, model, capsys):
    """The message comes before one about a missing prompt or text, and before "compiling"."""
    messages = set()
    for argv in (["run", model, "-p", "x"], ["chat", model], ["embed", model, "x"], ["compile", model], ["emit", model]):
        assert cli.main(argv) == 1
        messages.add(complaint(capsys))
    assert len(messages) == 1
    message = {"missing": "missing: no such file or directory", "junk.gguf": "is not a GGUF file", "adapter": "adapter of org/base",
            "unsupported": "model type 'abacus' is not supported", "weightless": "has neither model.safetensors nor"}  # fmt: skip
    assert message[model] in messages.pop()


@pytest.mark.parametrize("argv", [["run", "missing"], ["embed", "missing"], ["verify", "missing", "-n", "0"], ["run", "BUNDLE",
                         "--draft-model", "missing"], ["batch", "missing", "in.txt", "-o", "out.txt"]])  # fmt: skip
def test_a_missing_path_is_reported_before_anything_else(faulty, bundle, argv, capsys):
    assert cli.main([bundle if word == "BUNDLE" else word for word in argv]) == 1
    assert "missing: no such file or directory" in complaint(capsys)


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["run"], ["run", "x", "--tokens", "1,b"], ["run", "x", "a", "--bogus"], ["chat", "x", "y"],
             ["serve", "x", "--ports", "1"], ["run", "x", "-p", "a", "--tokens", "1"], ["run", "BUNDLE", "a", "-p", "b"],
             ["bench", "x", "--against", "vllm"], ["compile", "x", "--weights", "q9"]]
)  # fmt: skip
def test_wrong_usage_is_exit_status_2_and_names_the_help(bundle, argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([bundle if word == "BUNDLE" else word for word in argv])
    error = capsys.readouterr().err
    command = f" {argv[0]}" if argv and argv[0] in cli.COMMANDS else ""
    assert stop.value.code == 2 and error.startswith("castiron: ") and error.count("\n") == 1
    assert error.endswith(f"; see castiron{command} --help\n")


def test_a_bug_keeps_its_traceback(bundle, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(run_command, "read_prompt", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main(["run", bundle, "-p", "a"])


def test_a_closed_pipe_on_stdout_ends_the_command_without_a_traceback(bundle):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "castiron", "run", bundle, "-p", "abc", "--ignore-eos"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(write)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_habits_of_llama_cpp_and_ollama_work(bundle, capsys):
    """-m may come anywhere, --temp is --temperature, and layers for a GPU are ignored with a note."""
    asked = ["--tokens", "1,2", "-n", "3", "-c", "20", "--json"]
    assert cli.main(["run", bundle, *asked]) == cli.main(["run", *asked, "-m", bundle, "--temp", "0", "-ngl", "0"]) == 0
    out, err = capsys.readouterr()
    plain, habitual = (json.loads(line)["tokens"] for line in out.splitlines())
    assert plain == habitual and not err
    assert cli.main(["run", f"--model={bundle}", "a", "-n", "1", "--n-gpu-layers", "99"]) == 0
    assert "no effect: -ngl 99; to use a GPU, run castiron compile --target vulkan" in capsys.readouterr().err
    for argv, message in (
        (["run", "-m"], "argument -m has no value; give the path or the name of a model"),
        (["rnu"], "unknown command: rnu; did you mean run?"),
    ):
        with pytest.raises(SystemExit):
            cli.main(argv)
        assert message in complaint(capsys)


def test_names_of_types_have_any_case(capsys):
    """GGUF files are called Q4_K_M, and llama.cpp's options take this name."""
    for command in cli.COMMANDS:
        parser = cli.command_parser(command)
        for action in parser._actions:
            for choice in action.choices or ():
                value = parser._get_values(action, [choice.upper()])
                assert (value if isinstance(value, str) else value[0]) == choice
    texts = [cli.main(["emit", "--kernel", "gemv", "--shape", "16x32", "--codec", codec]) or capsys.readouterr().out
             for codec in ("q4_1", "Q4_1")]  # fmt: skip
    assert texts[0] == texts[1]
    assert Options(weights="Q4_K_M", kv_cache_type="F16", numerics="FAST") == Options(
        weights="q4_k_m", kv_cache_type="f16", numerics="fast"
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_help_shows_examples_and_one_line_for_each_option(command, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0 and f"  castiron {command}" in text
    assert "--json" in text or command in ("chat", "serve")
    assert "default: 1024" in text or command not in ("run", "chat")
    options = text.partition("\nexamples:")[0]
    named = re.findall(r"^  (?:-\w+(?: \S+)?, )?--(?:\[no-\])?([a-z-]+)\b.*  \S", options, re.MULTILINE)
    known = [a.option_strings for a in cli.command_parser(command)._actions if a.option_strings]
    assert sorted(named) == sorted(next(name[2:] for name in names if name.startswith("--")) for names in known)
    assert max(map(len, options.splitlines())) <= 110 and not re.search(r"^ {16}", options, re.MULTILINE)


def test_the_help_fits_one_screen_and_names_every_command(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    text = capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["help"])
    assert re.findall(r"^  castiron (\w+)", capsys.readouterr().out, re.MULTILINE) == list(cli.COMMANDS)[:5]
    assert len(text.splitlines()) < 24 and max(map(len, text.splitlines())) <= 80
    assert re.findall(r"^.{11}([a-z]+)  ", text, re.MULTILINE) == list(cli.COMMANDS)
    assert list(cli.COMMANDS)[:5] == ["run", "chat", "serve", "compile", "list"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_of_a_shell_has_every_option(shell, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["--print-completion", shell])
    script = capsys.readouterr().out
    assert stop.value.code == 0
    for command in cli.COMMANDS:
        for option in (o for action in cli.command_parser(command)._actions for o in action.option_strings if len(o) > 2):
            assert (option if shell != "fish" else option[2:]) in script, (command, option)


@pytest.mark.parametrize(
    "command, printed", [(["list"], "smollm2"), (["help", "compile"], "usage"), (["--print-completion", "bash"], "compile")]
)
def test_a_runtime_environment_is_enough(command, printed):
    """These commands work without the compiler, torch and the server's packages."""
    done = in_runtime_environment(*command)
    assert done.returncode == 0 and printed in done.stdout, done.stderr


def test_a_cached_bundle_of_a_name_runs_in_a_runtime_environment(bundle, tmp_path):
    """Nothing is downloaded, and a name without a bundle says what is missing."""
    shutil.copytree(bundle, tmp_path / "bundles/smollm2-135m-instruct")
    environment = {**os.environ, "CASTIRON_CACHE": str(tmp_path), "PIP_NO_INDEX": "1"}
    argv = ["--tokens", "1,2", "-n", "3", "--ignore-eos", "--json"]
    done = in_runtime_environment("run", "smollm2-135m-instruct", *argv, env=environment)
    expected = json.loads(castiron("run", bundle, *argv).stdout)["tokens"]
    assert done.returncode == 0 and json.loads(done.stdout)["tokens"] == expected, done.stderr


def in_runtime_environment(*argv: str, **options) -> subprocess.CompletedProcess:
    """Run a command where only the packages that run bundles are installed."""
    absent = "torch transformers iree.compiler gguf safetensors starlette uvicorn pydantic llama_cpp"
    program = (
        f"import importlib.metadata as metadata, sys; sys.modules.update(dict.fromkeys({absent.split()!r}))\n"
        "version = metadata.version\n"
        "def of_runtime(name):\n"
        "    if name == 'iree-base-compiler': raise metadata.PackageNotFoundError(name)\n"
        "    return version(name)\n"
        "metadata.version = of_runtime\n"
        "from castiron.pipelines.cli.main import main\nsys.exit(main())"
    )
    return subprocess.run([sys.executable, "-c", program, *argv], capture_output=True, text=True, timeout=120, **options)


def test_run_imports_only_the_modules_that_it_uses(bundle):
    code = (
        "import sys; from castiron.pipelines.cli.main import main; status = main(sys.argv[1:])\n"
        "print(status, sorted(m for m in sys.modules if m in "
        "('torch', 'transformers', 'iree.compiler', 'jinja2', 'gguf', 'email', 'castiron.emitter.graph.types', "
        "'castiron.pipelines.checkpoints.checkpoint', 'castiron.pipelines.compile.compile_model')))"
    )
    command = [sys.executable, "-c", code, "run", bundle, "--tokens", "1,2", "-n", "2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_the_pages_name_every_family_and_format():
    families = {path.stem for path in Path(models.__file__).parent.glob("*.py") if "\ndef forward(" in path.read_text()}
    assert set(models.FAMILIES) | set(models.ENCODERS) == families
    readme, page = (
        Path(__file__).parents[2].joinpath(name).read_text(encoding="utf-8") for name in ("README.md", "docs/models.md")
    )
    assert families | set(TEXT_PARTS) <= set(re.findall(r"[\w-]+", readme))
    assert {codec.upper() for codec in CODEC_OF_GGML_TYPE.values()} <= set(re.findall(r"\w+", page))


def test_list_names_the_models_of_the_catalogue(capsys):
    assert cli.main(["list", "--json"]) == 0
    assert "smollm2-135m-instruct" in {model["name"] for model in json.loads(capsys.readouterr().out)["catalogue"]}


def test_inspect_describes_bundles(bundle, bare_bundle, capsys):
    assert cli.main(["inspect", bundle, "--json"]) == 0
    assert read_json(capsys.readouterr().out)["context"] == CONTEXT
    assert cli.main(["inspect", bare_bundle]) == 0
    assert "takes token ids only" in capsys.readouterr().out


PROGRESS = """
import time
from castiron.pipelines import terminal as drawing
drawing.PATIENCE = drawing.INTERVAL = 0.02
def until_drawn():
    while progress.shown and not progress._drawn:
        time.sleep(0.01)
with drawing.Progress() as progress:
    progress('melting', 0.5)
    until_drawn()
    progress.print('a result')
    progress('compiling', 0.0)
    until_drawn()
print('done')
"""


def test_a_progress_bar_at_a_terminal_is_erased_at_the_end():
    out, shown = at_terminal(PROGRESS)
    assert out == "a result\ndone\n"
    assert re.search(r"melting +\[#+\.+\]  50%", shown) and re.search(r"compiling +\d+ s", shown) and "\n" not in shown
    assert shown.endswith("\r\x1b[Kend") and "100%" not in shown


def test_without_a_terminal_progress_is_quiet():
    done = subprocess.run([sys.executable, "-c", PROGRESS], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("a result\ndone\n", "")


def test_work_that_ends_at_once_is_not_drawn():
    code = "from castiron.pipelines.terminal import Progress\nwith Progress() as progress: progress('melting', 0.5)"
    assert at_terminal(code) == ("", "end")


def test_text_is_utf_8_in_every_locale(bundle):
    argv = ["run", bundle, "--tokens", "1", "-n", "20", "--ignore-eos", "--temperature", "50", "--seed", "3"]
    for more in ([], ["--json"]):
        here = castiron(*argv, *more, encoding="utf-8")
        there = castiron(*argv, *more, encoding="utf-8", env={**os.environ, "PYTHONIOENCODING": "ascii"})
        texts = [json.loads(done.stdout)["text"] if more else done.stdout for done in (here, there)]
        assert not texts[0].isascii() and texts[0] == texts[1], there.stderr


def test_file_names_that_are_not_utf_8_and_closed_standard_streams(bundle, tmp_path):
    """JSON escapes the bytes of a name, and nothing is written to a closed stream."""
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
