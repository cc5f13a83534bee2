"""Test docs/scores.md: lm-eval gets the same scores from castiron's server as from transformers."""

from __future__ import annotations

import json
import re
import shlex
import sys
import urllib.request
from functools import partialmethod
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from castiron.pipelines.checkpoints.catalogue import fetch
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.compile.open_model import open_or_compile
from castiron.pipelines.evaluate.perplexity import text_of
from tests.support.served import served

PAGE = (Path(__file__).parent.parent / "docs/scores.md").read_text(encoding="utf-8")
LINES = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
# Relative tolerance of a perplexity per word: logits differ by up to 2e-5, and their sum over a paragraph by up to 1e-4.
LAST_DIGITS = 4e-6
MODEL = "smollm2-135m-instruct"
# Two lm-eval tasks: choose the most likely of several endings, and the likelihood of complete paragraphs.
TASKS = {
    "endings": """
output_type: multiple_choice
doc_to_text: "{{begin}}"
doc_to_choice: "{{ends}}"
doc_to_target: "{{answer}}"
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "paragraphs": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Make the current directory of the page's commands, with the tasks."""
    location = tmp_path_factory.mktemp("scores")
    paragraphs = [line for line in text_of().splitlines() if 200 < len(line) < 500]
    halves = [(text[: text.index(" ", 60)], text[text.index(" ", 60) :][:60]) for text in paragraphs]
    documents = {
        "endings": [
            {"begin": group[n % 3][0], "ends": [end for _, end in group], "answer": n % 3}
            for n, group in enumerate(halves[first : first + 3] for first in range(0, 18, 3))
        ],
        "paragraphs": [{"text": text} for text in paragraphs[20:23]],
    }
    (location / "tasks").mkdir()
    for name, found in documents.items():
        data = location / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in found))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
        (location / "tasks" / f"{name}.yaml").write_text(head + TASKS[name])
    return location


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(open_or_compile(MODEL).path, tmp_path_factory.mktemp("serve") / "log") as found:
        yield found


@pytest.fixture
def measure(folder, server, monkeypatch, capsys):
    """Return a function that runs a command of the page and returns its metrics."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks import TaskManager

    # Finding lm-eval's own thousands of tasks takes longer than this measurement.
    monkeypatch.setattr(TaskManager, "__init__", partialmethod(TaskManager.__init__, include_defaults=False))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(folder / "datasets"))

    def run(words: list[str], *more: str) -> dict[str, str]:
        words = [word.replace("http://127.0.0.1:8000", server.url) for word in words]
        monkeypatch.setattr(sys, "argv", [*words, *more])
        cli_evaluate()
        rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()]
        return {row[4]: row[6] for row in rows if len(row) > 6 and re.fullmatch(r"\d+\.\d+", row[6])}

    return run


def in_f32(location: Path) -> None:
    """Write the model as an HF directory; transformers takes a minute to read the GGUF file."""
    checkpoint = open_checkpoint(fetch(MODEL))
    location.mkdir(parents=True)
    tensors = {name: tensor.dequantise() for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, location / "model.safetensors", {"format": "pt"})
    (location / "config.json").write_text(json.dumps({**checkpoint.config, "architectures": ["LlamaForCausalLM"]}))
    (location / "tokenizer.json").write_text(json.dumps(checkpoint.tokenizer))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (location / "tokenizer_config.json").write_text(json.dumps(names))


@pytest.mark.slow
def test_a_prompt_has_log_probabilities(server):
    """Send the request of the page."""
    (words,) = (words for words in LINES if words[0] == "curl")
    request = urllib.request.Request(words[1].replace("http://127.0.0.1:8000", server.url), words[3].encode())
    with urllib.request.urlopen(request) as answer:
        (choice,) = json.load(answer)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The sky is blue." == "".join(logprobs["tokens"]) and logprobs["token_logprobs"][0] is None
    assert all(-20 < logprob < 0 for logprob in logprobs["token_logprobs"][1:])


@pytest.mark.slow
def test_lm_eval_scores_are_those_of_transformers(folder, measure):
    asked, own = (words for words in LINES if words[0] == "lm-eval")
    in_f32(folder / own[own.index("--model_args") + 1].removeprefix("pretrained="))
    expected = measure(own)
    assert expected.keys() == {"acc", "acc_norm", "word_perplexity", "byte_perplexity"}
    assert float(expected["acc"]) > 0 and 5 < float(expected["word_perplexity"]) < 1000
    found = measure(asked)
    assert float(found.pop("word_perplexity")) == pytest.approx(float(expected.pop("word_perplexity")), rel=LAST_DIGITS)
    # The last of four printed digits may be rounded differently.
    assert float(found.pop("byte_perplexity")) == pytest.approx(float(expected.pop("byte_perplexity")), rel=0, abs=1.01e-4)
    assert found == expected
    at = asked.index("--model_args") + 1
    # Prompts as text instead of ids, and concurrent requests.
    others = [*asked[:at], "tokenized_requests=False", "num_concurrent=3", *asked[at:]]
    # The server's log-probabilities do not depend on the form of the requests.
    assert measure(others).items() >= found.items()


@pytest.mark.slow
def test_the_snippet_of_the_page_runs(server, monkeypatch, tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / MODEL).symlink_to(open_or_compile(MODEL).path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/scores.md", "exec"), {})
