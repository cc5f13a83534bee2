"""Engines, structured output, speculation, prefix reuse and a server on a Vulkan device."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import castiron
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.text.text_output import Stream, text_request
from castiron.vmfb.bundle.bundle import open_bundle
from tests.support.served import CONTEXT, SLOTS, ask, checkpoint, served
from tests.support.structured import PERSON

PROMPTS = ["Hello there", "Hello there again", "x", "abcabcabcabc", "The sky", "one two three", "zz", "Hello"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory) -> tuple[Path, Path]:
    """Return a model with a tokenizer, compiled for this CPU and for Vulkan."""
    folder = tmp_path_factory.mktemp("served")
    made = checkpoint(folder / "checkpoint")
    options = {"context": CONTEXT, "prefill": (16,), "batch": (SLOTS,), "verify_widths": (4,)}
    cpu, gpu = (compile_model(made, folder / target, Options(target=target, **options)).bundle for target in ("host", "vulkan"))
    return cpu, gpu


@pytest.fixture(scope="module")
def models(paths):
    with castiron.load(paths[0], threads=1) as cpu, castiron.load(paths[1]) as gpu:
        yield cpu, gpu


def test_prompts_share_slots_and_prefixes(models):
    wanted, found = ([result.tokens for result in model.generate(PROMPTS, max_tokens=10)] for model in models)
    assert found == wanted


def test_structured_output_and_sampling(models):
    for options in ({"json_schema": PERSON}, {"regex": "[a-c]{3,8}x"}, {"temperature": 1.0, "seed": 3, "top_k": 20}):
        wanted, found = (model.generate("Hello", max_tokens=40, **options).text for model in models)
        assert found == wanted, options
    assert re.fullmatch("[a-c]{3,8}x", models[1].generate("Hello", max_tokens=40, regex="[a-c]{3,8}x").text)


def test_speculation_keeps_the_tokens(paths):
    found = []
    for path in paths:
        engine = Engine(open_bundle(path), 1, single=True, ngrams=True)
        prompt = [20, 21, 22, 23] * 6
        stream = Stream(engine, text_request(prompt, engine.context, None, max_tokens=24, stop_tokens=()))
        for _ in stream:
            pass
        found.append(stream.tokens)
    assert found[0] == found[1] and len(found[0]) == 24


def test_a_prefix_cache_on_disk(paths, tmp_path):
    prompt = "Hello there, this prefix is long enough for chunks. " * 2
    with castiron.load(paths[1], prefix_cache=tmp_path / "prefixes") as model:
        wanted = model.generate(prompt[:100], max_tokens=6).tokens
    with castiron.load(paths[1], prefix_cache=tmp_path / "prefixes") as model:
        again = model.generate(prompt[:100], max_tokens=6)
    assert again.tokens == wanted


def resident(process_id: int) -> int:
    """Return the resident memory of a process in KB."""
    status = Path(f"/proc/{process_id}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])


def test_a_server_with_four_slots_keeps_its_memory(paths, models, tmp_path):
    """200 requests from four clients at once: the CPU's answers, and no memory for each request."""
    wanted = {prompt: models[0].generate(prompt, max_tokens=6).text for prompt in PROMPTS}

    def complete(number: int) -> tuple[str, str]:
        prompt = PROMPTS[number % len(PROMPTS)]
        body = {"prompt": prompt, "max_tokens": 6, "temperature": 0}
        status, _, answer = ask(server.url, "/v1/completions", body)
        assert status == 200, answer
        return prompt, answer["choices"][0]["text"]

    with served(paths[1], tmp_path / "log") as server, ThreadPoolExecutor(SLOTS) as clients:
        assert "4 sequences at once" in server.errors
        for prompt, text in clients.map(complete, range(60)):
            assert text == wanted[prompt]
        before = resident(server.process.pid)
        for prompt, text in clients.map(complete, range(200)):
            assert text == wanted[prompt]
        grown = resident(server.process.pid) - before
    assert grown < 20_000, f"{grown} KB more"


def test_a_chat_request_streams(paths, tmp_path):
    with served(paths[1], tmp_path / "log") as server:
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5, "temperature": 0, "stream": True}
        status, _, text = ask(server.url, "/v1/chat/completions", body)
    lines = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert status == 200 and lines and "".join(line["choices"][0]["delta"].get("content") or "" for line in lines)
