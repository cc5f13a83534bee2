"""Test how commands fail: as a JSON object with --json, and with a remedy for the installation."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from castiron.pipelines import errors
from castiron.pipelines.checkpoints.catalogue import CATALOGUE
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.open_model import cached_path
from castiron.pipelines.errors import error_message
from castiron.pipelines.terminal import Progress
from castiron.pipelines.text.chat_template import prepare
from castiron.vmfb.cache_folder import claim
from tests.cli.test_cli import complaint
from tests.support import toy_text
from tests.support.tiny_gguf import write_llama
from tests.support.toy_text import read_json

bundle = toy_text.bundle

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("argv", "kind", "message"),
    [
        (["inspect", "/no/such.gguf"], "CheckpointError", "/no/such.gguf"),
        (["run", "/no/such"], "CheckpointError", "/no/such: no such file or directory"),
        (["compile", "/no/such.gguf"], "CheckpointError", "/no/such.gguf"),
        (["emit", "/no/such.gguf"], "CheckpointError", "/no/such.gguf"),
        (["emit"], "PipelineError", "give a MODEL"),
        (["list", "/no/such"], "PipelineError", "/no/such: no such file or directory"),
    ],
)
def test_a_failure_is_one_json_object(argv, kind, message, capsys):
    assert cli.main(argv) == 1
    out, err = capsys.readouterr()
    assert out == "" and message in err
    assert cli.main([*argv, "--json"]) == 1
    out, again = capsys.readouterr()
    assert read_json(out) == {"error": {"message": err.removeprefix("castiron: ").strip(), "type": kind}} and again == err


@pytest.mark.parametrize("argv", [["run", "--json"], ["run", "x", "--bogus", "--json"], ["nonsense", "--json"]])
def test_a_usage_error_is_a_json_object(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(argv)
    out, err = capsys.readouterr()
    error = read_json(out)["error"]
    assert stop.value.code == 2 and error["type"] == "UsageError" and error["message"] in err


def test_an_interrupt_is_exit_status_130(bundle, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("castiron.vmfb.bundle.bundle.open_bundle", interrupted)
    assert cli.main(["inspect", bundle]) == 130
    assert capsys.readouterr() == ("", "castiron: interrupted\n")
    assert cli.main(["inspect", bundle, "--json"]) == 130
    assert read_json(capsys.readouterr().out) == {"error": {"message": "interrupted", "type": "Interrupted"}}


@pytest.mark.parametrize("command", ["run", "serve", "compile"])
def test_more_threads_than_cpus_are_refused(bundle, command, monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert cli.main([command, bundle, "--threads", "7"]) == 1
    out, err = capsys.readouterr()
    assert err.startswith("castiron: --threads is 7, but this machine has 6 CPUs; give at most 6") and out == ""


def test_threads_of_a_remote_machine_are_not_checked(monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    rows = ["batch", "/no/such.gguf", "/no/such.jsonl", "-o", "answers.jsonl", "--ray"]
    for command in (["compile", "/no/such.gguf", "--target", "aarch64"], [*rows, "head:6379"]):
        assert cli.main([*command, "--threads", "64"]) == 1
        assert "/no/such" in capsys.readouterr().err
    monkeypatch.setattr("pathlib.Path.exists", lambda path: True)
    assert cli.main([*rows, "local", "--threads", "64"]) == 1
    assert "give at most 6" in capsys.readouterr().err


def missing(module: str) -> str:
    return error_message(ModuleNotFoundError(f"No module named {module!r}", name=module))


def test_a_misspelled_path_suggests_its_siblings(bundle, tmp_path, monkeypatch, capsys):
    """Also where a folder of the path is misspelled, and in every option that names a file."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(bundle, "build/my-model")
    write_llama(tmp_path / "llama.Q4_K_M.gguf")
    Path("prompts.jsonl").write_text('{"prompt": "a"}')
    Path("adapters/lora").mkdir(parents=True)
    Path("adapters/lora/adapter_model.safetensors").touch()
    for argv, suggestion in (
        ("run build/my-modle a", "build/my-model"),
        ("run ./bulid/my-model a", "build/my-model"),
        ("explain build/My-Model", "build/my-model"),
        ("inspect llama.q4_k_m.gguf", "llama.Q4_K_M.gguf"),
        (f"run {tmp_path}/build/my-m a", f"{tmp_path}/build/my-model"),
        ("run build/my-model -f promts.jsonl", "prompts.jsonl"),
        ("batch build/my-model prompt.jsonl -o out.jsonl", "prompts.jsonl"),
        ("verify build/my-model --prompts prompts.jsnl", "prompts.jsonl"),
        ("list biuld", "build"),
        ("compile llama.Q4_K_M.gguf --adapter adapters/lroa", "adapters/lora"),
    ):
        assert cli.main(argv.split()) == 1
        message = complaint(capsys)
        assert re.search(rf"no such .*; did you mean (\S*/)?{suggestion}\?$", message, re.IGNORECASE), message
    for argv in (["compile", "llama.Q4_K_M.gguf"], ["quantise", "llama.Q4_K_M.gguf", "-o", "out.gguf"]):
        assert cli.main([*argv, "--adapter", "adapters/lora/adapter_model.safetensors"]) == 1
        assert f"is a file of an adapter; give its directory, {tmp_path}/adapters/lora" in complaint(capsys)
    assert cli.main(["run", "nothing-like-it", "a"]) == 1
    assert "did you mean" not in complaint(capsys)


def test_a_clone_suggests_its_extra():
    assert missing("nonsense") is None
    for extra, modules in errors.EXTRAS.items():
        assert errors.requirements(extra), extra
        for message in map(missing, modules.split()):
            assert f"-m pip install -e {ROOT}[{extra}]" in message.replace("'", "")


def test_a_wheel_suggests_published_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(errors.castiron, "__file__", str(tmp_path / "castiron" / "__init__.py"))
    message = missing("transformers")
    assert "pip install torch==" in message and "transformers==" in message and "castiron[" not in message
    assert "iree-base-compiler==" in missing("iree.compiler")


def test_help_command_prints_the_help_of_the_command(capsys):
    texts = []
    for argv in (["help", "pack"], ["pack", "--help"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(argv)
        assert stop.value.code == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].startswith("usage: castiron pack ")
    with pytest.raises(SystemExit):
        cli.main(["help"])
    assert "castiron help COMMAND" in capsys.readouterr().out


def test_list_and_rm_know_the_bundles_of_the_cache(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    cached, fetched = tmp_path / "cache/bundles", tmp_path / "cache/models" / CATALOGUE["gemma-3-270m"].file
    for name in ("gemma-3-270m", "gemma-3-270m-12345678", "other-12345678"):
        claim(cached / name)
        shutil.copytree(bundle, cached / name)
    os.utime(cached / "other-12345678", (0, 0))
    claim(fetched)
    fetched.write_bytes(bytes(1000))
    assert cli.main(["list", "--json"]) == cli.main(["list"]) == 0
    found, _, text = capsys.readouterr().out.partition("\n")
    rows = json.loads(found)["cached"]
    assert len(rows) == 3 and (rows[-1]["path"], rows[-1]["last_used"]) == (
        str(cached / "other-12345678"),
        "1970-01-01T00:00:00Z",
    )
    model = {model["name"]: model for model in json.loads(found)["catalogue"]}["gemma-3-270m"]
    assert model["fetched"] and model["file"] in text and model["packages"][0] in text and model["licence"] in text
    assert cli.main(["rm", "gemma-3-271m"]) == 1
    assert "no such bundle; did you mean gemma-3-270m?" in complaint(capsys)
    reader = subprocess.Popen(["sleep", "60"], stdin=open(cached / "other-12345678/weights.irpa"))
    assert cli.main(["rm", "other-12345678"]) == 1
    reader.kill()
    assert f"other-12345678 is in use by process {reader.pid}" in complaint(capsys) and reader.wait()
    shutil.copytree(bundle, "mine")
    Path("mine/notes").touch()
    for name, gone in (("Gemma-3-270M", [cached / "gemma-3-270m", cached / "gemma-3-270m-12345678", fetched]),
                       ("other-12345678", [cached / "other-12345678"]), ("mine", [Path("mine")])):  # fmt: skip
        assert cli.main(["rm", name, "--json"]) == 0
        result = read_json(capsys.readouterr().out)
        assert result["removed"] == list(map(str, gone)) and result["bytes"] > 1000
    assert list(cached.glob("[!.]*")) == list(fetched.parent.glob("[!.]*")) == [] and os.listdir("mine") == ["notes"]
    assert cli.main(["rm", "mine"]) == 1
    assert "mine: no such bundle; castiron list shows bundles" in complaint(capsys)


def test_rm_does_not_choose_between_a_folder_and_the_cache(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_llama(tmp_path / "smollm2-135m-instruct.gguf")
    of_path = cached_path(tmp_path / "smollm2-135m-instruct.gguf", Options())
    for name in ("gemma-3-270m", "other-12345678"):
        shutil.copytree(bundle, tmp_path / "cache/bundles" / name)
        shutil.copytree(bundle, name)
        capsys.readouterr()
        assert cli.main(["rm", name]) == 1
        cached = tmp_path / "cache/bundles" / name
        assert f"{name} is a path and a name in the cache; give ./{name} or {cached}" in complaint(capsys)
        assert cached.exists() and Path(name).exists()
        assert cli.main(["rm", f"./{name}"]) == 0 and cached.exists() and not Path(name).exists()
        assert cli.main(["rm", str(cached)]) == 0 and not cached.exists()
        # A folder that is no bundle is not meant.
        shutil.copytree(bundle, cached)
        Path(name).mkdir()
        assert cli.main(["rm", name]) == 0 and not cached.exists() and Path(name).exists()
    shutil.copytree(bundle, of_path)
    capsys.readouterr()
    assert cli.main(["rm", "smollm2-135m-instruct.gguf", "--json"]) == 0
    assert read_json(capsys.readouterr().out)["removed"] == [str(of_path)]


def test_list_shows_catalogue_and_bundles(bundle, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("CASTIRON_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["list"]) == 0
    assert "no bundles in build" in capsys.readouterr().out
    Path("build").mkdir()
    os.symlink(bundle, "build/toy")
    (tmp_path / "other/broken").mkdir(parents=True)
    (tmp_path / "other/broken/manifest.json").write_text("{}")
    assert cli.main(["pack", bundle, "-o", "other/toy.castiron"]) == 0
    capsys.readouterr()
    assert cli.main(["list", "other", "--json"]) == 0
    found = read_json(capsys.readouterr().out)
    assert {m["name"]: m["fetched"] for m in found["catalogue"]}["smollm2-135m-instruct"] is False
    rows = {row["path"]: row for row in found["bundles"]}
    assert list(rows) == ["build/toy", "other/broken", "other/toy.castiron"]
    assert rows["build/toy"]["context"] == toy_text.CONTEXT and not rows["build/toy"]["packed"]
    assert rows["other/toy.castiron"]["packed"] and "schema" in rows["other/broken"]["error"]
    assert cli.main(["list", "other"]) == 0
    text = capsys.readouterr().out
    assert all(path in text for path in rows) and json.dumps(toy_text.CONTEXT) in text


LIMITED = """
import resource, sys
from pathlib import Path
from castiron.pipelines.cli.main import main
from castiron.pipelines.cli import run, serve
pages = int(Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + int(sys.argv[1]) * 1_000_000,) * 2)
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux limits the address space of a process")
@pytest.mark.parametrize("megabytes", [1, 24, 60, 100])
def test_little_memory_is_one_line(path, megabytes):
    """Threads, libraries and buffers need address space, which ends at different places."""
    command = [sys.executable, "-c", LIMITED, str(megabytes), "run", str(path), "Hello", "-n", "1"]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=60)
    lines = done.stderr.splitlines()
    assert done.returncode in (0, 1) and all(line.startswith("castiron: ") for line in lines), done.stderr
    assert not done.returncode or len(lines) == 1 and "memory" in lines[0]
    assert megabytes > 1 or done.returncode, "there is enough memory"


def test_a_server_without_memory_for_threads_is_one_line(path, monkeypatch, capsys):
    start = threading.Thread.start

    def limited(thread):
        if thread.name == "model":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert cli.main(["serve", str(path), "--port", "0"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("castiron: out of memory or threads: can't start new thread; ")


def test_optional_threads_may_fail(path, monkeypatch, capsys):
    """Such as those that draw a progress bar, or import a library early."""

    def fail(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    progress = Progress()
    progress.shown = True
    progress("reading", 0.5)
    progress.close()
    prepare()


ESCAPE = "\x1b]0;owned\x07\r\x1b[31m"


def at_terminal(argv: list[str], **environment: str) -> str:
    """Return what a command prints at a pseudo-terminal."""
    pid, end = pty.fork()
    if not pid:
        command = [sys.executable, "-m", "castiron", *argv]
        os.execve(sys.executable, command, {**os.environ, "TERM": "xterm", **environment})
    shown = b""
    # Linux raises an error at the end.
    with contextlib.suppress(OSError):
        while data := os.read(end, 4096):
            shown += data
    os.waitpid(pid, 0)
    os.close(end)
    return shown.decode()


def test_no_control_character_of_a_path_reaches_a_terminal(bundle, tmp_path):
    shutil.copytree(bundle, folder := tmp_path / f"model{ESCAPE}")
    run = ["run", str(folder), "--tokens", "1,2", "-n", "1", "--json"]
    for argv in (["cache"], ["list", str(tmp_path)], ["inspect", str(folder)], ["run", f"{folder}/none", "a"], run):
        shown = at_terminal(argv, CASTIRON_CACHE=str(tmp_path / f"cache{ESCAPE}"))
        assert not re.search("[\x07\x1b]", shown.replace("\x1b[2m", "").replace("\x1b[0m", "")), argv
        assert "owned" in shown or argv[0] != "cache"
    # A pipe gets the path as it is.
    done = subprocess.run([sys.executable, "-m", "castiron", "cache"], capture_output=True, text=True,
                          env={**os.environ, "CASTIRON_CACHE": str(tmp_path / f"cache{ESCAPE}")})  # fmt: skip
    assert ESCAPE.replace("\r", "\n") in done.stdout
