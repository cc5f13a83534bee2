"""Test the pages listed in PAGES: every command runs, every snippet and number is right."""

from __future__ import annotations

import ast
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

from castiron.pipelines.cli import main as cli
from castiron.pipelines.engine.memory import megabytes
from castiron.pipelines.server.metrics import Metrics
from tests.support import served as serving
from tests.support import toy_text

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
    for name in "index batch serving structured endpoints embeddings finetune troubleshooting trust editors guarantees".split()
}
MODEL, EMBEDDING_MODEL, CODE_MODEL = "smollm2-135m-instruct", "embeddinggemma-300m", "qwen2.5-coder-1.5b"
# Pages that other files test, or without commands.
ELSEWHERE = set(
    "agents architecture caches commands coming-from emitter cluster chat models kernels deploy python porting "
    "scores states devices".split()
)


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGES[page], re.DOTALL | re.MULTILINE)


def lines(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Write a tiny model with a tokenizer and a chat template, named like the model of the pages."""
    location, config = tmp_path_factory.mktemp("models") / MODEL, {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    return serving.checkpoint(location, serving.TOOLS_TEMPLATE, **config)


@pytest.fixture(scope="session")
def folder(checkpoint, tmp_path_factory):
    """Make the current directory of the pages' commands, with the models that they start from."""
    # Its import takes seconds.
    from tests.support import encoders

    location = tmp_path_factory.mktemp("guides")
    assert cli.main(["compile", str(checkpoint), "-o", str(location / "build" / MODEL), "--context", "1024"]) == 0
    config = {"use_bidirectional_attention": True, "num_hidden_layers": 1, "layer_types": ["sliding_attention"]}
    embedding = location / "models" / EMBEDDING_MODEL
    embedding.parent.mkdir()
    encoders.write("gemma3_text", embedding, pooling="mean", dense=(80, 64), longest=48, **config)
    assert cli.main(["compile", str(embedding), "-o", str(location / "build" / EMBEDDING_MODEL)]) == 0
    coder = serving.checkpoint(location / "models" / CODE_MODEL, num_hidden_layers=1, max_position_embeddings=8192)
    toy_text.with_fim(serving.tokenizer(), 200).save(str(coder / "tokenizer.json"))
    assert cli.main(["compile", str(coder), "-o", str(location / "build" / CODE_MODEL), "--context", "1024"]) == 0
    return location


def run(line: str, folder: Path, checkpoint: Path) -> subprocess.CompletedProcess:
    """Run a line of a page in bash, with the tiny model instead of the page's."""
    line = re.sub(rf"(?<!/){MODEL}", str(checkpoint), line)
    if line.startswith("castiron compile "):
        line += f" -o build/{MODEL}" if " -o " not in line else ""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "bin/castiron").write_text(f'#!/bin/sh\nexec {sys.executable} -m castiron "$@"\n')
    (folder / "bin/castiron").chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True)


def served(line: str) -> bool:
    """Return whether the line starts a server, which does not end, or is a client of one."""
    return "castiron serve " in line or line.startswith("curl ")


COMMANDS = [(page, line) for page in PAGES for line in lines(page) if not served(line)]


@pytest.mark.slow
def test_the_fine_tune_becomes_a_complete_model(checkpoint, folder, monkeypatch):
    """Run the page's Python in the directory that it describes; later commands use its output."""
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
    elif " -o " not in line and " > " not in line:
        assert done.stdout.strip()


def test_every_page_is_listed():
    assert {path.stem for path in DOCS.glob("*.md")} - set(PAGES) == ELSEWHERE


@pytest.mark.slow
def test_the_server_answers_its_clients_and_requires_a_key(folder, tmp_path):
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
@pytest.mark.parametrize(
    ("page", "model"), [("structured", MODEL), ("endpoints", MODEL), ("embeddings", EMBEDDING_MODEL), ("editors", CODE_MODEL)]
)
def test_the_snippets_of_a_page_run(page, model, folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    with serving.served(folder / "build" / model, tmp_path / "log") as running:
        here = lambda text: re.sub(r"http://127\.0\.0\.1:80(00|12)", running.url, text)
        asked = [line for line in lines(page) if line.startswith("curl ")]
        for line in asked:
            done = subprocess.run([*shlex.split(here(line)), "--silent", "--fail"], capture_output=True, text=True)
            assert done.returncode == 0, line
            answer = json.loads(done.stdout)
            assert page != "structured" or answer["choices"][0]["message"]["content"] in ("yes", "no")
        for code in blocks(page, "python"):
            exec(compile(here(code), f"docs/{page}.md", "exec"), {"__name__": "page"})
        assert asked


def serve_arguments(words: list[str]):
    """Parse arguments of `castiron serve`; fail for an unknown option."""
    assert words[1:2] == ["serve"] and words[0].endswith("castiron")
    return cli.command_parser("serve").parse_args(words[2:])


def test_castiron_serve_accepts_every_line_of_the_page():
    for line in lines("serving"):
        if "castiron serve" in line:
            serve_arguments(shlex.split(line[line.index("castiron serve") :]))


def test_the_proxy_has_the_servers_body_limit_and_a_longer_timeout():
    (text,) = blocks("serving", "nginx")
    plain = serve_arguments(["castiron", "serve", "x"])
    value = lambda name: float(re.search(rf"{name} (\d+)[ms];", text)[1])
    assert value("client_max_body_size") == plain.max_body and value("proxy_read_timeout") > plain.timeout
    assert f"http://127.0.0.1:{plain.port};" in text and "proxy_buffering off;" in text
    assert text.count("{") == text.count("}") and all(re.search(r"[{};]$", line) for line in text.splitlines() if line.strip())


def test_the_container_has_the_locked_packages_and_a_valid_command():
    (text,) = blocks("serving", "dockerfile")
    text = text.replace("\\\n", " ")
    pins = {name.lower(): version for name, version in re.findall(r"([\w-]+)==([\w.]+)", text)}
    lock = dict(line.lower().split("==") for line in (ROOT / "requirements.lock").read_text().splitlines() if "==" in line)
    assert pins.keys() >= {"iree-base-runtime", "tokenizers", "starlette", "uvicorn", "pydantic", "numpy", "jinja2"}
    assert all(lock[name] == version for name, version in pins.items())
    import castiron

    assert set(re.findall(r"castiron_llm-([\d.]+)-py3", text)) == {castiron.__version__}
    command = json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1])
    assert serve_arguments(command).port == int(re.search(r"^EXPOSE (\d+)$", text, re.MULTILINE)[1])


def test_the_container_passes_hadolint():
    (text,) = blocks("serving", "dockerfile")
    lint = lambda text: subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "hadolint", "--no-color", "-"], input=text, capture_output=True, text=True
    )
    assert (found := lint(text)).returncode == 0, found.stdout
    assert "DL3006" in lint(text.replace("python:3.12-slim", "python")).stdout


def test_the_kubernetes_manifest_is_consistent_and_has_enough_memory():
    deployment, service = yaml.safe_load_all(blocks("serving", "yaml")[0])
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    (port,) = container["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]
    arguments = serve_arguments(container["args"])
    assert (arguments.port, arguments.host) == (port["containerPort"], "0.0.0.0")
    # The pod still gets requests until the endpoints are updated; running ones may end.
    (command, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep" and int(seconds) > 0
    assert spec["terminationGracePeriodSeconds"] > int(seconds) + arguments.shutdown_timeout
    # The process writes only into its cache, which is in /tmp in the image.
    assert container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsNonRoot"]
    assert [mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp"] == [
        spec["volumes"][0]["name"]
    ]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": port["name"]}
    resources = container["resources"]
    assert resources["requests"] == resources["limits"] and arguments.threads == int(resources["limits"]["cpu"])
    # The limit is the sum of the page's own numbers: weights, states of all slots, and the process.
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
    assert megabytes(math.prod(map(int, factors[1].split(" × ")))) == factors[2] and page.count(factors[2]) == 3


def test_the_metrics_and_defaults_of_the_page_exist():
    page = PAGES["serving"]
    known = set(re.findall(r"^# HELP (\S+)", Metrics().text(), re.MULTILINE))
    named = set(re.findall(r"`((?:castiron_|vllm:)\w+)`", page))
    assert len(named) > 5 and named <= known
    plain = serve_arguments(["castiron", "serve", "x"])
    for name, value in re.findall(r"`--(queue|timeout|max-body|grace)\s(\d+)`", page):
        assert getattr(plain, name.replace("-", "_")) == float(value), name


def messages() -> str:
    """Return every string in castiron's code, one per line, with `…` for each inserted value."""
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
    """A `…` of the page may stand for several inserted values and the text between them."""
    known = messages()
    quoted = re.findall(r"^\| (?:iree-compile )?`([^`]*…[^`]*)`", PAGES["troubleshooting"], re.MULTILINE)
    assert len(quoted) > 10
    for message in quoted:
        pieces = [re.escape(piece.strip()) for piece in message.split("…")]
        assert re.search("[^\n]*".join(pieces), known), message


def test_options_in_the_pages_exist():
    """An option belongs to the command in the same quote; without a command, to any command."""
    parsers = {name: cli.command_parser(name) for name in cli.COMMANDS}
    options = {name: {word for a in parser._actions for word in a.option_strings} for name, parser in parsers.items()}
    everything = set().union(*options.values()) | {"--version", "--print-completion"}
    for page, text in PAGES.items():
        for quote in re.findall(r"`([^`\n]+)`", text):
            words = re.split(r"[\s=]+", quote)
            if words[0] in ("pip", "llama-perplexity"):
                continue
            known = options.get(words[1], everything) if words[0] == "castiron" and len(words) > 1 else everything
            unknown = {word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word)} - known
            assert not unknown - {"--outfile"}, f"{page}: {quote}"


def test_links_between_pages_work():
    for page in (*DOCS.glob("*.md"), *ROOT.glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
