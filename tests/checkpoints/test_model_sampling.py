"""A model's generation_config sets the sampling of chat and serve; invalid values are rejected."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient
from transformers import RepetitionPenaltyLogitsProcessor

from castiron.pipelines.api.openai.chat import parse_chat
from castiron.pipelines.api.openai.records import ChatRequest
from castiron.pipelines.checkpoints.checkpoint import CheckpointError
from castiron.pipelines.checkpoints.gguf.hf_config import sampling_metadata
from castiron.pipelines.checkpoints.open_checkpoint import open_checkpoint
from castiron.pipelines.cli import main as cli
from castiron.pipelines.engine.request import Chooser
from castiron.pipelines.engine.sampling import Sampler, Sampling, model_sampling
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.server.app import open_app
from castiron.vmfb.bundle.bundle import open_bundle
from tests.support import toy_text
from tests.support.tiny_gguf import write_llama
from tests.support.toy_text import read_json

OWN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """A bundle whose generation_config asks for sampling."""
    path = toy_text.write(tmp_path_factory.mktemp("bundle") / "toy")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "generation": OWN}))
    return path


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({}, None),
        ({"eos_token_id": 2, "max_length": 20}, None),
        (OWN, Sampling(0.7, 20, 0.8, 0.0, 1.05, repeat_last_n=-1)),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, Sampling()),
        ({"do_sample": False, "repetition_penalty": 1.1}, Sampling(repeat_penalty=1.1, repeat_last_n=-1)),
        ({"do_sample": True, "repetition_penalty": 1.0}, Sampling(1.0)),
        ({"temperature": 0.6}, Sampling(0.6)),
        ({"do_sample": True, "min_p": 0.15, "top_p": None, "top_k": -1}, Sampling(1.0, 0, 1.0, 0.15)),
    ],
)
def test_a_generation_config_gives_the_sampling(generation, sampling):
    assert model_sampling(generation) == sampling


def test_a_gguf_file_states_its_sampling_defaults(tmp_path):
    """llama.cpp's general.sampling keys are read and written."""
    stated = {"temp": 0.7, "top_k": 20, "top_p": 0.8, "penalty_repeat": 1.05, "mirostat": 0}
    path = write_llama(tmp_path / "tiny.gguf", {f"general.sampling.{key}": value for key, value in stated.items()})
    generation = open_checkpoint(path).generation_config
    # llama.cpp's penalty counts 64 tokens unless the file states another number; HF's counts all.
    assert model_sampling(generation) == replace(model_sampling(OWN), repeat_last_n=64)
    for last in (-1, 20):
        keys = {f"general.sampling.{key}": value for key, value in {**stated, "penalty_last_n": last}.items()}
        found = model_sampling(open_checkpoint(write_llama(tmp_path / f"{last}.gguf", keys)).generation_config)
        assert found == replace(model_sampling(OWN), repeat_last_n=last)
    stated["penalty_last_n"] = -1
    assert sampling_metadata(OWN) == {f"general.sampling.{key}": value for key, value in stated.items() if key != "mirostat"}
    assert sampling_metadata({"do_sample": False, "temperature": 0.6}) == {}
    assert sampling_metadata({"do_sample": True}) == {"general.sampling.temp": 1.0}
    with pytest.raises(CheckpointError, match=r"general\.sampling\.temp is 'warm', not a number"):
        open_checkpoint(write_llama(tmp_path / "warm.gguf", {"general.sampling.temp": "warm"}))


@pytest.mark.parametrize(
    "generation",
    [{"top_p": -0.1}, {"temperature": "warm" * 999}, {"top_k": True}, {"top_k": 10**400}],
)
def test_a_generation_config_out_of_range_ends_in_one_line(generation):
    with pytest.raises(PipelineError, match=r"^invalid generation_config.json .* compile the model again$") as error:
        model_sampling(generation)
    assert len(str(error.value)) < 300


@settings(max_examples=50, deadline=None)
@given(st.floats(0.5, 2), st.integers(0, 300), st.integers(0, 99))
def test_the_repetition_penalty_counts_the_complete_context_as_in_hf(penalty, length, seed):
    rng = np.random.default_rng(seed)
    context = rng.integers(0, 40, length).tolist()
    chooser = Chooser(Sampler(model_sampling({"repetition_penalty": penalty})), recent=context)
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    for logits in rng.normal(size=(30, 50)).astype(np.float32):
        expected = processor(torch.tensor([context], dtype=torch.long), torch.from_numpy(logits[None].copy()))[0]
        token = chooser.pick(int(logits.argmax()), lambda logits=logits: logits)
        assert token == int(expected.argmax())
        chooser.accept(token)
        context.append(token)


MESSAGES = [{"role": "user", "content": "abc"}]


@pytest.mark.parametrize(("name", "last"), [("repeat_penalty", 64), ("repetition_penalty", -1)])
def test_a_requests_penalty_counts_the_tokens_that_its_name_implies(name, last, bundle):
    """repeat_penalty is llama.cpp's name, and repetition_penalty that of HF and vLLM."""
    with TestClient(open_app(open_bundle(bundle), threads=1)) as client:
        api = client.app.api
        found = api.sampling_of(parse_chat(ChatRequest(messages=MESSAGES, **{name: 1.3})))
        assert (found.repeat_penalty, found.repeat_last_n) == (1.3, last)
        assert api.sampling_of(parse_chat(ChatRequest(messages=MESSAGES))) == model_sampling(OWN)


@given(st.dictionaries(st.sampled_from([*OWN, "min_p"]), st.none() | st.booleans() | st.floats() | st.integers() | st.text()))
def test_any_generation_config_is_accepted_or_rejected(generation):
    try:
        found = model_sampling(generation)
    except PipelineError:
        return
    assert str(found or Sampling())


def test_chat_defaults_to_the_models_sampling(bundle, monkeypatch, capsys):
    from castiron.pipelines.cli import chat

    found = []
    monkeypatch.setattr(chat.Console, "run", lambda self: found.append(self.chat.sampler.sampling) or 0)
    monkeypatch.setattr(chat.sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr(chat, "ChatInput", lambda *_: None)
    for more in ([], ["--temperature", "0"], ["--top-k", "3", "--seed", "1"], ["--speculative", "ngram"]):
        assert cli.main(["chat", str(bundle), *more, "--threads", "1"]) == 0
    shown = capsys.readouterr().err
    own = model_sampling(OWN)
    assert found[:3] == [own, replace(own, temperature=0), replace(own, top_k=3, seed=1)]
    assert "temperature 0.7, top-k 20, top-p 0.8, repeat-penalty 1.05" in shown and "greedy, repeat-penalty 1.05" in shown
    # Speculation does not change the sampling.
    assert found[3] == own


def test_run_is_greedy_by_default(bundle, tmp_path, capsys):
    plain = toy_text.write(tmp_path / "plain")
    found = []
    for path in (bundle, plain):
        assert cli.main(["run", str(path), "abc", "-n", "9", "--ignore-eos", "--json"]) == 0
        found.append(read_json(capsys.readouterr().out)["tokens"])
    assert found[0] == found[1]
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    assert "Greedy unless --temperature is given" in " ".join(capsys.readouterr().out.split())


def test_options_that_need_a_temperature_are_rejected_or_warn(tmp_path, capsys):
    """They are an error by default, and a warning if the user asks for greedy decoding."""
    path = str(toy_text.write(tmp_path / "greedy"))
    run, chat = ["run", path, "abc", "-n", "1"], ["chat", path, "--threads", "1"]
    options = {"--top-k": "5", "--top-p": "0.9", "--min-p": "0.1", "--seed": "3"}
    argv = [word for pair in options.items() for word in pair]
    for command, words, named in (
        *((run, [name, value], name) for name, value in options.items()), (run, argv, ", ".join(options)), (chat, argv, ", ".join(options))
    ):  # fmt: skip
        assert cli.main([*command, *words]) == 1
        error = capsys.readouterr().err
        assert f"greedy decoding: {named}" in error and "--temperature 1" in error and error.count("\n") == 1
    for temperature, warns in (("0", True), ("1", False)):
        assert cli.main([*run, *argv, "--temperature", temperature]) == 0
        assert ("greedy decoding: --top-k" in capsys.readouterr().err) is warns


def test_server_defaults_to_the_models_sampling(bundle, tmp_path):
    asked = []

    def listening(app):
        submit = app.api.engine.submit
        app.api.engine.submit = lambda requests: asked.extend(requests) or submit(requests)
        return app

    body = {"prompt": "abc", "max_tokens": 2, "ignore_eos": True}
    for path, own in ((bundle, model_sampling(OWN)), (toy_text.write(tmp_path / "plain"), Sampling(1.0))):
        with TestClient(listening(open_app(open_bundle(path), threads=1))) as client:
            (model,) = client.get("/v1/models").json()["data"]
            assert Sampling(**model["sampling"]) == own
            for more in ({}, {"temperature": 0.5}, {"top_k": 0, "repetition_penalty": 1, "min_p": 0.1}):
                assert client.post("/v1/completions", json={**body, **more}).status_code == 200
        found = [replace(request.chooser.sampler.sampling, logit_bias={}) for request in asked[-3:]]
        expected = [own, replace(own, temperature=0.5), replace(own, top_k=0, repeat_penalty=1, min_p=0.1, repeat_last_n=-1)]
        assert found == expected
