"""Greedy tokens of real checkpoints are those of HF transformers in f32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from castiron.pipelines import evaluate
from tests.models.checkpoints import fetch

FOLDER = Path(evaluate.__file__).parent
LONG = {"name": "long", "prompt": (FOLDER / "evaluate_text.txt").read_text(encoding="utf-8")[:11_000], "raw": True}
PREFIX, SUFFIX = "def add(a, b):\n    return", "\n\nprint(add(1, 2))"
FIM = {"name": "fim", "prompt": f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>", "raw": True}


def run(*arguments: str | Path) -> dict:
    """Run a castiron command in a process of its own, which returns its memory; return its JSON."""
    command = [sys.executable, "-m", "castiron", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE).stdout)


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", ["qwen2.5-coder-0.5b-instruct", "qwen2.5-coder-1.5b-instruct"])
def test_greedy_tokens_are_those_of_hf(name, tmp_path):
    """48 tokens of the prompts of `castiron verify`, a code completion and more than 2,000 tokens."""
    bundle, prompts = tmp_path / "bundle", tmp_path / "prompts.jsonl"
    more = "\n".join(map(json.dumps, (FIM, LONG)))
    prompts.write_text((FOLDER / "verify_prompts.jsonl").read_text(encoding="utf-8") + more, encoding="utf-8")
    run("compile", fetch(name) / "model.gguf", "-o", bundle, "--context", 4096, "--batch", "none", "--verify-widths", "none")
    found = run("verify", bundle, "--prompts", prompts, "-n", 48)
    print(f"{name}: smallest margin of HF {min(prompt['smallest_hf_margin'] for prompt in found['prompts']):.4f}")
    assert found["compared"] == 34 and not found["skipped"]
    assert max(prompt["prompt_tokens"] for prompt in found["prompts"]) > 2000
    different = [prompt for prompt in found["prompts"] if not prompt["exact"]]
    assert found["exact"] and not different, different
    completed = run("run", bundle, "-p", PREFIX, "--suffix", SUFFIX, "-n", 48)
    assert completed["text"].startswith(" a + b\n")
    assert completed["tokens"] == run("run", bundle, "-p", FIM["prompt"], "--raw", "-n", 48)["tokens"]
