"""docs/scores.md: lm-eval finds the same figures with a server as with transformers, by the page's own commands."""

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

from castiron.pipelines.casting.cast import cast
from castiron.pipelines.checking.likelihood import text_of
from castiron.pipelines.checkpoints import open_checkpoint
from castiron.pipelines.checkpoints.catalogue import fetch
from tests.pipelines.served import served

PAGE = (Path(__file__).parent.parent / "docs/scores.md").read_text(encoding="utf-8")
LINES = [
    shlex.split(line)
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    for line in block.replace("\\\n", " ").splitlines()
]
# Of a perplexity per word. Logits that are added up in other orders are 2e-5 apart at most, and 1e-4 in the sum of a paragraph
# of 60 words.
LAST_DIGITS = 4e-6
MODEL = "smollm2-135m-instruct"
# Two tasks as lm-eval has them: whether the true ending is the likeliest, and how likely whole texts are.
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
    """Where the page's commands are typed."""
    place = tmp_path_factory.mktemp("scores")
    paragraphs = [line for line in text_of().splitlines() if 200 < len(line) < 500]
    halves = [(text[: text.index(" ", 60)], text[text.index(" ", 60) :][:60]) for text in paragraphs]
    documents = {
        "endings": [
            {"begin": several[n % 3][0], "ends": [end for _, end in several], "answer": n % 3}
            for n, several in enumerate(halves[first : first + 3] for first in range(0, 18, 3))
        ],
        "paragraphs": [{"text": text} for text in paragraphs[20:23]],
    }
    (place / "tasks").mkdir()
    for name, found in documents.items():
        data = place / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in found))
        head = f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
        (place / "tasks" / f"{name}.yaml").write_text(head + TASKS[name])
    return place


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served(cast(MODEL).path, tmp_path_factory.mktemp("serve") / "log") as found:
        yield found


@pytest.fixture
def measure(folder, server, monkeypatch, capsys):
    """What a command prints of each task and metric, run as the page has it but for the address and `more` of its model's
    arguments."""
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.tasks import TaskManager

    # Its own thousands of tasks take longer to be found than these to be measured.
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


def in_f32(place: Path) -> None:
    """The model for transformers, which takes a minute to read a GGUF file."""
    checkpoint = open_checkpoint(fetch(MODEL))
    place.mkdir(parents=True)
    tensors = {name: tensor.dequantise() for name, tensor in checkpoint.tensors.items()}
    save_file(tensors, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps({**checkpoint.config, "architectures": ["LlamaForCausalLM"]}))
    (place / "tokenizer.json").write_text(json.dumps(checkpoint.tokenizer))
    names = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (place / "tokenizer_config.json").write_text(json.dumps(names))


@pytest.mark.slow
def test_a_prompt_has_log_probabilities(server):
    """The page's own request."""
    (words,) = (words for words in LINES if words[0] == "curl")
    request = urllib.request.Request(words[1].replace("http://127.0.0.1:8000", server.url), words[3].encode())
    with urllib.request.urlopen(request) as answer:
        (choice,) = json.load(answer)["choices"]
    logprobs = choice["logprobs"]
    assert choice["text"] == "The sky is blue." == "".join(logprobs["tokens"]) and logprobs["token_logprobs"][0] is None
    assert all(-20 < logprob < 0 for logprob in logprobs["token_logprobs"][1:])


@pytest.mark.slow
def test_lm_eval_finds_what_it_finds_with_transformers(folder, measure):
    asked, own = (words for words in LINES if words[0] == "lm-eval")
    in_f32(folder / own[own.index("--model_args") + 1].removeprefix("pretrained="))
    expected = measure(own)
    assert expected.keys() == {"acc", "acc_norm", "word_perplexity", "byte_perplexity"}
    assert float(expected["acc"]) > 0 and 5 < float(expected["word_perplexity"]) < 1000
    found = measure(asked)
    assert float(found.pop("word_perplexity")) == pytest.approx(float(expected.pop("word_perplexity")), rel=LAST_DIGITS)
    # Of four digits behind the point the last may be rounded up here and down there.
    assert float(found.pop("byte_perplexity")) == pytest.approx(float(expected.pop("byte_perplexity")), rel=0, abs=1.01e-4)
    assert found == expected
    at = asked.index("--model_args") + 1
    # As texts, one after another, and several requests at once.
    others = [*asked[:at], "tokenized_requests=False", "num_concurrent=3", *asked[at:]]
    # What the server says is the same to the last bit however it is asked.
    assert measure(others).items() >= found.items()


@pytest.mark.slow
def test_the_snippet_of_the_page_runs(server, monkeypatch, tmp_path):
    (code,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / MODEL).symlink_to(cast(MODEL).path)
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "docs/scores.md", "exec"), {})
