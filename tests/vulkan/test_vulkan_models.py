"""SmolLM2 and Gemma 3 on a Vulkan device: HF's greedy tokens by `castiron verify`, and a chat."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.pipelines import evaluate

EVERY = os.environ.get("CASTIRON_VULKAN") == "all"
# Prompts, and tokens after each.
PROMPTS, TOKENS = (16, 32) if EVERY else (2, 8)
MODELS = ("smollm2-135m-instruct", "gemma-3-270m") if EVERY else ("smollm2-135m-instruct",)


def castiron(*arguments: object, stdin: str | None = None) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "castiron", *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, text=True)


@pytest.fixture(scope="module", params=MODELS)
def bundle(request, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("models") / "bundle"
    sizes = ("--context", 320, "--batch", "none", "--verify-widths", "none")
    done = castiron("compile", request.param, "-o", out, "--target", "vulkan", *sizes)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.timeout(3600)
def test_verify_is_exact(bundle, tmp_path):
    lines = (Path(evaluate.__file__).parent / "verify_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    shortest = sorted(lines, key=len)[:PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(shortest), encoding="utf-8")
    done = castiron("verify", bundle, "--prompts", tmp_path / "prompts.jsonl", "-n", TOKENS, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["exact"] and found["compared"] == PROMPTS and not found["skipped"]


def test_chat_answers_and_remembers(bundle):
    if "gemma" in str(json.loads((bundle / "manifest.json").read_text())["name"]):
        pytest.skip("a base model without a chat template")
    done = castiron("chat", bundle, "--temperature", 0, "-n", 12, stdin="My name is Ada.\nWhat is my name?\n")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
