"""docs/batch.md, serving.md, structured.md, endpoints.md, finetune.md, troubleshooting.md, trust.md and index.md: every command runs, every snippet and number holds."""

from __future__ import annotations

import ast
import configparser
import json
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml

from castiron.pipelines import cli
from castiron.pipelines.measuring.memory import megabytes
from castiron.pipelines.serve.metrics import Metrics
from castiron.reference.tiny import tiny_model
from tests.pipelines import served as serving

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in ("index", "batch", "serving", "structured", "endpoints", "finetune", "troubleshooting", "trust")
}
MODEL = "smollm2-135m-instruct"
# What the tests of other files run: README's, and those of pages with a test of their own.
ELSEWHERE = {"caches", "cluster", "chat", "embeddings", "models", "kernels", "deploy", "python", "porting", "scores", "states"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def lines(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny model with a tokenizer and a chat template, by the name of the one that the pages have."""
    place = tiny_model("llama", tmp_path_factory.mktemp("models") / MODEL, num_hidden_layers=1, max_position_embeddings=4096)
    serving.tokenizer().save(str(place / "tokenizer.json"))
    # One that knows of tools, in the form of Llama 3.
    template = '{% if tools %}{{ tools | tojson }} "parameters": dictionary{% endif %}' + serving.TEMPLATE
    config = {"chat_template": template, "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


@pytest.fixture(scope="session")
def folder(checkpoint, tmp_path_factory):
    """Where the pages' commands are typed, with the bundle that they begin with."""
    place = tmp_path_factory.mktemp("guides")
    assert cli.main(["compile", str(checkpoint), "-o", str(place / "build" / MODEL), "--context", "1024"]) == 0
    return place


def run(line: str, folder: Path, checkpoint: Path) -> subprocess.CompletedProcess:
    """A line of a page, in bash, with the tiny model for the one that it names."""
    line = re.sub(rf"(?<!/){MODEL}", str(checkpoint), line)
    if line.startswith("castiron compile "):
        line += f" -o build/{MODEL}" if " -o " not in line else ""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/castiron").write_text(f'#!/bin/sh\nexec {sys.executable} -m castiron "$@"\n')
    (folder / "bin/castiron").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)


def served(line: str) -> bool:
    """Lines for a server, which never ends, and its clients."""
    return "castiron serve " in line or line.startswith("curl ")


COMMANDS = [(page, line) for page in PAGES for line in lines(page) if not served(line)]


@pytest.mark.slow
def test_the_fine_tune_becomes_a_whole_model(checkpoint, folder, monkeypatch):
    """The page's Python, where its first lines say it stands; the commands after it begin with what it writes."""
    shutil.copytree(checkpoint, folder / "outputs/checkpoint-500")
    monkeypatch.chdir(folder)
    (code,) = blocks("finetune", "python")
    exec(compile(code, "docs/finetune.md", "exec"), {})
    assert (folder / "merged/tokenizer.json").exists() and list((folder / "merged").glob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_a_command_of_a_page_works(page, line, folder, checkpoint):
    done = run(line, folder, checkpoint)
    assert done.returncode == 0, done.stderr[-2000:]
    if "--json" in line:
        assert "error" not in json.loads(done.stdout)
    elif " -o " not in line:
        assert done.stdout.strip()


def test_pages_of_other_tests_are_all_that_are_not_here():
    assert {path.stem for path in DOCS.glob("*.md")} - set(PAGES) == ELSEWHERE


@pytest.mark.slow
def test_the_server_answers_its_clients_and_nobody_without_a_key(folder, tmp_path):
    keyed, *clients = (line for line in lines("serving") if served(line) and "KEY=" in line or line.startswith("curl "))
    name, _, keys = shlex.split(keyed)[0].partition("=")
    assert shlex.split(keyed)[1:3] == ["castiron", "serve"]
    with serving.served(folder / "build" / MODEL, tmp_path / "log", **{name: keys}) as running:
        for line in clients:
            words = [word.replace("http://127.0.0.1:8000", running.url) for word in shlex.split(line)]
            assert subprocess.run([*words, "--silent", "--fail"], capture_output=True).returncode == 0, line
        without = [word for word in words[:1]] + [f"{running.url}/v1/models", "--silent", "--fail"]
        assert subprocess.run(without, capture_output=True).returncode != 0
        assert re.search(r"memory: weights .* states 8 x ", running.errors)


@pytest.mark.slow
def test_the_snippets_of_structured_output_and_of_other_apis_run_against_a_server_and_without_one(
    folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(folder)
    with serving.served(folder / "build" / MODEL, tmp_path / "log") as running:
        here = lambda text: text.replace("http://127.0.0.1:8000", running.url)
        for page in ("structured", "endpoints"):
            asked = [line for line in lines(page) if line.startswith("curl ")]
            for line in asked:
                done = subprocess.run([*shlex.split(here(line)), "--silent", "--fail"], capture_output=True, text=True)
                assert done.returncode == 0, line
                answer = json.loads(done.stdout)
                assert page == "endpoints" or answer["choices"][0]["message"]["content"] in ("yes", "no")
            for code in blocks(page, "python"):
                exec(compile(here(code), f"docs/{page}.md", "exec"), {"__name__": "page"})
            assert asked


def serve_arguments(words: list[str]):
    """As the parser of `castiron serve` reads them; fails for an option that is not there."""
    assert words[1:2] == ["serve"] and words[0].endswith("castiron")
    return cli.build_parser(["serve"]).parse_args(words[1:])


def test_every_line_that_serves_is_one_that_serve_takes():
    for line in lines("serving"):
        if "castiron serve" in line:
            serve_arguments(shlex.split(line[line.index("castiron serve") :]))


def test_the_proxy_lets_through_what_the_server_takes_and_waits_as_long():
    (text,) = blocks("serving", "nginx")
    plain = serve_arguments(["castiron", "serve", "x"])
    value = lambda name: float(re.search(rf"{name} (\d+)[ms];", text)[1])
    assert value("client_max_body_size") == plain.max_body and value("proxy_read_timeout") > plain.timeout
    assert f"http://127.0.0.1:{plain.port};" in text and "proxy_buffering off;" in text
    assert text.count("{") == text.count("}") and all(re.search(r"[{};]$", line) for line in text.splitlines() if line.strip())


def test_the_unit_is_one_and_stops_after_the_servers_grace():
    (text,) = blocks("serving", "ini")
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str
    unit.read_string(text)
    assert {"Unit", "Service", "Install"} == set(unit.sections())
    arguments = serve_arguments(shlex.split(unit["Service"]["ExecStart"]))
    assert int(unit["Service"]["TimeoutStopSec"]) > arguments.grace


def test_the_container_has_the_locked_packages_and_a_command_that_serve_takes():
    (text,) = blocks("serving", "dockerfile")
    text = text.replace("\\\n", " ")
    pins = {name.lower(): version for name, version in re.findall(r"([\w-]+)==([\w.]+)", text)}
    lock = dict(line.lower().split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    assert pins.keys() >= {"iree-base-runtime", "tokenizers", "starlette", "uvicorn", "pydantic", "numpy", "jinja2"}
    assert all(lock[name] == version for name, version in pins.items())
    import castiron

    assert set(re.findall(r"castiron-([\d.]+)-py3", text)) == {castiron.__version__}
    command = json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    assert serve_arguments(command).port == int(re.search(r"^EXPOSE (\d+)$", text, re.MULTILINE)[1])


def test_the_container_is_written_as_hadolint_has_it():
    (text,) = blocks("serving", "dockerfile")
    lint = lambda text: subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "hadolint", "--no-color", "-"], input=text, capture_output=True, text=True
    )
    assert (found := lint(text)).returncode == 0, found.stdout
    assert "DL3006" in lint(text.replace("python:3.12-slim", "python")).stdout


def test_the_manifest_of_kubernetes_holds_together_and_has_the_memory_that_the_bundle_needs():
    deployment, service = yaml.safe_load_all(blocks("serving", "yaml")[0])
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    arguments = serve_arguments(container["args"])
    assert (arguments.port, arguments.host) == (port["containerPort"], "0.0.0.0")
    # Requests come until all have heard that this one is going, and those that came may end.
    (command, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep" and int(seconds) > 0
    assert spec["terminationGracePeriodSeconds"] > int(seconds) + arguments.grace
    # The process writes into the cache alone, which lies in /tmp in the image.
    assert container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsNonRoot"]
    assert [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"] == [
        spec["volumes"][0]["name"]
    ]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    resources = container["resources"]
    assert resources["requests"] == resources["limits"] and arguments.threads == int(resources["limits"]["cpu"])
    # As the page's own numbers of its bundle have it: weights, full slots, and what the process takes.
    weights, slots, state = re.search(
        r"in castiron serve weights ([\d.]+) MB, states (\d+) x ([\d.]+) MB", PAGES["serving"]
    ).groups()
    (process,) = re.findall(r"Leave (\d+) MB for the process", PAGES["serving"])
    needed = float(weights) + int(slots) * float(state) + int(process)
    assert resources["limits"]["memory"] == f"{math.ceil(needed)}M"
    assert f"{weights} + {slots} × {state} + {process} MB" in PAGES["serving"]


def test_the_sizes_of_the_page_are_right():
    page = PAGES["serving"]
    factors = re.search(r"SmolLM2-135M ((?:[\d]+ × )+\d+) = ([\d.]+ MB)", page)
    size = 1
    for number in factors[1].split(" × "):
        size *= int(number)
    assert megabytes(size) == factors[2] and page.count(factors[2]) == 3


def test_the_page_names_metrics_and_defaults_that_there_are():
    page = PAGES["serving"]
    known = {metric.name for metric in vars(Metrics()).values()}
    named = set(re.findall(r"`((?:castiron_|vllm:)\w+)`", page))
    assert len(named) > 5 and named <= known
    plain = serve_arguments(["castiron", "serve", "x"])
    for name, value in re.findall(r"`--(queue|timeout|max-body|grace)\s(\d+)`", page):
        assert getattr(plain, name.replace("-", "_")) == float(value), name


def sentences() -> str:
    """Every text in castiron's own code, one a line, with `…` for what is filled in."""
    found = []
    for package in ("pipelines", "vmfb", "emitter"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    found.append("".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(" ".join(text.split()) for text in found)


def test_the_messages_of_the_page_are_castirons():
    """Up to the last `…`, and whatever stands for one: several parts that are filled in may touch."""
    known = sentences()
    quoted = re.findall(r"^\| (?:iree-compile )?`([^`]*…[^`]*)`", PAGES["troubleshooting"], re.MULTILINE)
    assert len(quoted) > 10
    for message in quoted:
        pieces = [re.escape(piece.strip()) for piece in message.split("…")]
        assert re.search("[^\n]*".join(pieces), known), message


def test_options_that_the_pages_name_are_there():
    """Of the command that a line or a sentence names before them; of any command where none is named."""
    parsers = cli.build_parser((), whole=True)._subparsers._group_actions[0].choices
    options = {name: {word for a in parser._actions for word in a.option_strings} for name, parser in parsers.items()}
    everything = set().union(*options.values()) | {"--version"}
    for page, text in PAGES.items():
        for quote in re.findall(r"`([^`\n]+)`", text):
            words = re.split(r"[\s=]+", quote)
            if words[0] == "pip":
                continue
            known = options.get(words[1], everything) if words[0] == "castiron" and len(words) > 1 else everything
            unknown = {word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)} - known
            assert not unknown - {"--outfile"}, f"{page}: {quote}"


def test_links_between_pages_lead_somewhere():
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
