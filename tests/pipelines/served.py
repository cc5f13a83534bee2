"""A small random model with a tokenizer and batch functions, and `castiron serve` in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from castiron.pipelines.casting.compile import Options, compile_model
from castiron.pipelines.generation.text import Text, load_text
from castiron.reference import tiny
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session

CONTEXT, SLOTS = 126, 4
SPECIAL = ("<unk>", "<s>", "</s>")
# One token a character, so that every text is a prompt and every answer is text.
LETTERS = [" ", *map(chr, range(0x21, 0x7F)), *map(chr, range(0xC0, 0xC0 + 211 - 95 - len(SPECIAL)))]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
MESSAGES = [{"role": "user", "content": "Hello there"}]
# TEMPLATE of MESSAGES.
RENDERED = "u:Hello there;a:"


def tokenizer() -> Tokenizer:
    """Special tokens 0 to 2, then the letters."""
    found = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *LETTERS])}, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    found.decoder = decoders.Fuse()
    found.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return found


def checkpoint(directory: Path) -> Path:
    """Writes its HF directory."""
    made = tiny.tiny_model("llama", directory)
    tokenizer().save(str(made / "tokenizer.json"))
    (made / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return made


@functools.cache
def bundle(directory: Path, speculate: tuple[int, ...] = ()) -> Path:
    """Compiles it below `directory`, once a process."""
    options = Options(context=CONTEXT, batch=(SLOTS,), speculate=speculate)
    return compile_model(checkpoint(directory / "checkpoint"), directory / "tiny", options).bundle


class Alone:
    """What the model says when nobody else asks: the library's own session, one token after another."""

    def __init__(self, path: Path):
        self.bundle = open_bundle(path)
        self.text: Text = load_text(self.bundle)

    def tokens(self, prompt: str | list[int], count: int) -> list[int]:
        """Greedy, past any end-of-text token."""
        session = Session(self.bundle, 1)
        found = [session.prefill(self.text.encode(prompt) if isinstance(prompt, str) else prompt)]
        while len(found) < count:
            found.append(session.step(found[-1]))
        return found

    def says(self, prompt: str | list[int], count: int) -> str:
        return self.text.decode(self.tokens(prompt, count))

    def logits(self, prompt: str):
        session = Session(self.bundle, 1)
        session.prefill(self.text.encode(prompt))
        return session.logits()


class Served:
    """A running server: its address, its process, and what it has written to stderr so far."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path):
        self.process, self.url, self.log = process, url, log

    @property
    def errors(self) -> str:
        return self.log.read_text()


# The small model answers faster than a test can look: every step and prompt takes at least so many seconds here, and no step but
# the first, with which an answer begins, is made while a file is there.
SLOW = """
import itertools, os, sys, time
from castiron.vmfb.batch import Batch
from castiron.vmfb.session import Session
steps = itertools.count()
def slowly(function, held):
    def slow(*arguments):
        time.sleep(float(sys.argv[1]))
        while held and next(steps) and os.path.exists(held):
            time.sleep(0.005)
        return function(*arguments)
    return slow
Batch.step, Session.prefill = slowly(Batch.step, sys.argv[2]), slowly(Session.prefill, "")
from castiron.pipelines.cli import main
sys.exit(main(sys.argv[3:]))
"""


@contextlib.contextmanager
def served(
    path: Path,
    log: Path,
    *options: str,
    slow: float = 0,
    held: Path | None = None,
    descriptors: int | None = None,
    **environment: str,
):
    """`castiron serve` on a free port, with steps of at least `slow` seconds, which but for the first wait while the file `held` is
    there, and at most so many `descriptors`; killed at the end if it still runs."""
    start = ["-c", SLOW, str(slow), str(held or "")] if slow or held else ["-m", "castiron"]
    command = [sys.executable, *start, "serve", str(path), "--port", "0", "--threads", "1", *options]
    if descriptors:
        command = ["sh", "-c", f'ulimit -n {descriptors} && exec "$0" "$@"', *command]
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=file, env={**os.environ, **environment},
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    try:
        while not (found := re.search(r"http://\S+", log.read_text())):
            assert process.poll() is None, log.read_text()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.05)
        yield Served(process, found[0], log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
