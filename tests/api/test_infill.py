"""`suffix` in completions, and the requests of editors to /infill."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from castiron.pipelines.cli.main import main
from castiron.pipelines.server.app import open_app
from castiron.vmfb.bundle.manifest import TOKENIZER, Tokens
from tests.support import toy_text
from tests.vmfb import toy

# Recorded from llama.vim of January 31, 2026 (commit a1c8e6e) in Vim 9.0; `VIM` is without the texts, and with a
# smaller n_predict. In Vim's normal mode it sends chunks of other files, to have them in the cache, and then completes.
CHUNKS = {
    "input_suffix": "", "input_prefix": "", "temperature": 0.0, "id_slot": 0, "samplers": [], "n_predict": 0, "model": "",
    "input_extra": [{"filename": "f", "time": [1795804214, 239598], "text": "b\n"}], "response_fields": [""],
    "t_max_predict_ms": 1, "stream": False, "cache_prompt": True, "prompt": "", "t_max_prompt_ms": 1,
}  # fmt: skip
VIM = {
    "response_fields": ["content", "timings/prompt_n", "timings/prompt_ms", "timings/prompt_per_token_ms",
                        "timings/prompt_per_second", "timings/predicted_n", "timings/predicted_ms",
                        "timings/predicted_per_token_ms", "timings/predicted_per_second", "truncated", "tokens_cached"],
    "t_max_prompt_ms": 500, "t_max_predict_ms": 250, "n_indent": 0, "stop": [], "stream": False, "top_k": 40, "top_p": 0.9,
    "id_slot": 0, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "n_predict": 6, "model": "",
}  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    files = {TOKENIZER: toy_text.with_fim(toy_text.tokenizer(), 20).to_str()}
    where = tmp_path_factory.mktemp("fim") / "toy"
    return toy.write(where, 64, files=files, config=toy_text.CONFIG, tokens=Tokens(None, (toy_text.EOS,))).path


@pytest.fixture(scope="module")
def client(path):
    with TestClient(open_app(path, threads=1)) as found:
        yield found


def post(client, path: str, **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def infill(client, prefix: str = "ab", suffix: str = "cd", **more):
    return post(client, "/infill", input_prefix=prefix, input_suffix=suffix, **more)


def raw(client, prompt: str, count: int) -> str:
    """Return the completion of a prompt that a client, as Continue, has made itself."""
    body = {"prompt": prompt, "max_tokens": count, "temperature": 0, "stop": ["<|endoftext|>", *toy_text.FIM]}
    return post(client, "/v1/completions", **body)["choices"][0]["text"]


def test_a_suffix_makes_the_prompt_of_the_family(client):
    full = raw(client, "<|fim_prefix|>ab<|fim_suffix|>cd<|fim_middle|>", 6)
    given = {"prompt": ["ab", "a"], "suffix": "cd", "max_tokens": 6, "temperature": 0}
    first, _ = post(client, "/v1/completions", **given)["choices"]
    assert first["text"] == full == infill(client, n_predict=6)["content"]
    ollama = {"prompt": "ab", "suffix": "cd", "stream": False, "options": {"num_predict": 6, "temperature": 0}}
    assert post(client, "/api/generate", **ollama)["response"] == full
    assert post(client, "/v1/completions", **given | {"suffix": ""})["usage"]["prompt_tokens"] == 3


def test_the_answer_has_llama_cpps_fields(client):
    answer = infill(client, n_predict=4)
    assert answer["stop"] and answer["stop_type"] in ("limit", "eos") and answer["tokens_evaluated"] == 7
    assert answer["tokens_predicted"] == len(answer["tokens"]) == answer["timings"]["predicted_n"]
    assert answer["timings"]["cache_n"] + answer["timings"]["prompt_n"] == 7
    stopped = infill(client, n_predict=9, stop=[answer["content"][1]])
    assert (stopped["content"], stopped["stop_type"]) == (answer["content"][0], "word")


def test_a_stream_joins_to_the_answer_and_ends_with_stop(client):
    body = {"input_prefix": "ab", "input_suffix": "cd", "n_predict": 5, "stream": True}
    events = client.post("/infill", json=body).text.removesuffix("\n\n").split("\n\n")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert "".join(part["content"] for part in parts) == infill(client, n_predict=5)["content"]


def test_the_requests_of_llama_vim_are_answered(client):
    assert post(client, "/infill", **CHUNKS) == {}
    answer = infill(client, "ab\n", "cd\n", **VIM, prompt="a", input_extra=CHUNKS["input_extra"])
    assert set(answer) == set(VIM["response_fields"])
    prompt = "<|file_sep|>f\nb\n<|file_sep|>filename\n<|fim_prefix|>ab\na<|fim_suffix|>cd\n<|fim_middle|>"
    assert answer["content"] == raw(client, prompt, 6)
    cached = infill(client, "ab\n", "cd\n", **{**VIM, "response_fields": None}, prompt="ab", input_extra=CHUNKS["input_extra"])
    assert cached["timings"]["cache_n"] >= 18


def test_a_prompt_that_does_not_fit_is_cut(client):
    answer = infill(client, "a" * 500, "b" * 500, n_predict=8, input_extra=CHUNKS["input_extra"])
    assert answer["tokens_evaluated"] + 8 <= 65 and answer["tokens_predicted"] > 0


def test_requests_that_cannot_be_answered_are_rejected(client, tmp_path):
    error = lambda client, path, **body: client.post(path, json=body).json()["error"]
    assert error(client, "/v1/completions", prompt=[1], suffix="a")["param"] == "suffix"
    assert error(client, "/v1/completions", prompt="a", suffix="a", echo=True)["param"] == "echo"
    assert error(client, "/infill", input_prefix="a")["param"] == "input_suffix"
    with TestClient(open_app(toy_text.write(tmp_path / "toy"), threads=1)) as plain:
        for path, body in (
            ("/v1/completions", {"prompt": "a", "suffix": "b"}),
            ("/infill", {"input_prefix": "", "input_suffix": ""}),
        ):
            assert "fill-in-the-middle" in error(plain, path, **body)["message"]


def test_run_completes_before_a_suffix(client, path, tmp_path, capsys):
    assert main(["run", str(path), "ab", "--suffix", "cd", "-n", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == infill(client, n_predict=6)["content"]
    assert main(["run", str(path), "ab", "--suffix", "cd", "--system", "x"]) == 1
    assert main(["run", str(toy_text.write(tmp_path / "toy")), "ab", "--suffix", "cd"]) == 1
    assert "fill-in-the-middle" in capsys.readouterr().err
