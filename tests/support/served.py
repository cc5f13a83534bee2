"""A small random model with a tokenizer and batch functions, and `castiron serve` as a process."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.text.tokenizer import Tokenizer, load_tokenizer
from castiron.reference import tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session

CONTEXT, SLOTS = 126, 4
SPECIAL = ("<unk>", "<s>", "</s>")
# Each character is a token, so that every text is a prompt and every answer is text.
LETTERS = [" ", *map(chr, range(0x21, 0x7F)), *map(chr, range(0xC0, 0xC0 + 211 - 95 - len(SPECIAL)))]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
# With tools in the format of Llama 3.
CALLS = (
    "{% for c in m.tool_calls or [] %}"
    '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}{% endfor %}'
)
TOOLS_TEMPLATE = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE.replace(
    "m.content }}", "m.content or '' }}" + CALLS
)
MESSAGES = [{"role": "user", "content": "Hello there"}]
# TEMPLATE of MESSAGES.
RENDERED = "u:Hello there;a:"


def tokenizer() -> tokenizers.Tokenizer:
    """Return a tokenizer: ids 0 to 2 are the special tokens, the others letters."""
    found = tokenizers.Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *LETTERS])}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return found


def checkpoint(directory: Path, template: str | None = None, **config) -> Path:
    """Write the model as an HF directory; `config` changes its config.json."""
    made = tiny.tiny_model("llama", directory, **config)
    tokenizer().save(str(made / "tokenizer.json"))
    text = {"chat_template": template or TEMPLATE, "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (made / "tokenizer_config.json").write_text(json.dumps(text))
    return made


@functools.cache
def bundle(directory: Path, verify_widths: tuple[int, ...] = (), numerics: str = "exact") -> Path:
    """Compile the model below `directory`, once per process."""
    options = Options(context=CONTEXT, batch=(SLOTS,), verify_widths=verify_widths, numerics=numerics)
    return compile_model(checkpoint(directory / "checkpoint"), directory / "tiny", options).bundle


class ReferenceSession:
    """A reference for the server: a session that answers one request at a time, token by token."""

    def __init__(self, path: Path):
        self.bundle = open_bundle(path)
        self.text: Tokenizer = load_tokenizer(self.bundle)

    def tokens(self, prompt: str | list[int], count: int) -> list[int]:
        """Return `count` greedy tokens, also past an end-of-text token."""
        session = Session(self.bundle, 1)
        found = [session.prefill(self.text.encode(prompt) if isinstance(prompt, str) else prompt)]
        while len(found) < count:
            found.append(session.step(found[-1]))
        return found

    def generate(self, prompt: str | list[int], count: int) -> str:
        return self.text.decode(self.tokens(prompt, count))

    def logits(self, prompt: str):
        session = Session(self.bundle, 1)
        session.prefill(self.text.encode(prompt))
        return session.logits()


class Served:
    """A running server: its address, its process, and its stderr so far."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path):
        self.process, self.url, self.log = process, url, log

    @property
    def errors(self) -> str:
        return self.log.read_text()


def ask(
    url: str, path: str, body: dict | bytes | None = None, key: str = "", headers: Mapping[str, str] = MappingProxyType({})
):
    """Return status, headers and the decoded JSON or text of an answer; accept any certificate."""
    own = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    request = urllib.request.Request(url + path, data, {**own, **headers})
    try:
        answer = urllib.request.urlopen(request, timeout=120, context=ssl._create_unverified_context())
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        data = answer.read().decode()
    return answer.status, answer.headers, json.loads(data) if data.startswith("{") else data


# Slow the small model down: each step and prompt takes at least argv[1] seconds, and each step after the first waits while the
# file argv[2] exists.
SLOW = """
import itertools, os, sys, time
from castiron.vmfb.run.session import Batch, Session
steps = itertools.count()
def slowly(function, pause):
    def slow(*arguments, **options):
        time.sleep(float(sys.argv[1]))
        while pause and next(steps) and os.path.exists(pause):
            time.sleep(0.005)
        return function(*arguments, **options)
    return slow
Batch.step, Session.prefill = slowly(Batch.step, sys.argv[2]), slowly(Session.prefill, "")
from castiron.pipelines.cli.main import main
sys.exit(main(sys.argv[3:]))
"""


def served(path: Path, log: Path, *options: str, slow: float = 0, pause: Path | None = None, **environment: str):
    """Run `castiron serve` on a free port; kill it at the end if it still runs.

    slow: min seconds of a step. pause: a file that stops steps after the first while it exists.
    """
    start = ["-c", SLOW, str(slow), str(pause or "")] if slow or pause else ["-m", "castiron"]
    command = [sys.executable, *start, "serve", str(path), "--port", "0", "--threads", "1", *options]
    return running(command, log, {**os.environ, **environment}, Path(__file__).parents[2])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str | Path], log: Path, environment: dict[str, str], folder: Path = Path("/")):
    """Run a server; yield it when it has printed its address, and kill it at the end."""
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=environment, cwd=folder)
    try:
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield Served(process, found[0].replace("0.0.0.0", "127.0.0.1"), log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
