"""How tokens are chosen where nobody says: a model's own generation_config, in chat and serve; and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from castiron.pipelines import cli
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.model_sampling import in_words, model_sampling
from castiron.pipelines.generation.sampling import Sampling
from castiron.pipelines.serve.app import open_app
from castiron.vmfb.bundle import open_bundle
from tests.pipelines import toy_text
from tests.pipelines.toy_text import read_json

OWN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    """Its model's makers want it to draw."""
    path = toy_text.write(tmp_path_factory.mktemp("bundle") / "toy")
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "generation": OWN}))
    return path


@pytest.mark.parametrize(
    ("generation", "sampling"),
    [
        ({}, None),
        ({"eos_token_id": 2, "max_length": 20}, None),
        (OWN, Sampling(0.7, 20, 0.8, 0.0, 1.05)),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, Sampling()),
        ({"do_sample": False, "repetition_penalty": 1.1}, Sampling(repeat_penalty=1.1)),
        ({"temperature": 0.6}, Sampling(0.6)),
        ({"do_sample": True, "min_p": 0.15, "top_p": None, "top_k": -1}, Sampling(1.0, 0, 1.0, 0.15)),
    ],
)
def test_what_a_generation_config_states_is_what_it_means(generation, sampling):
    assert model_sampling(generation) == sampling


@pytest.mark.parametrize(
    "generation",
    [{"top_p": 0}, {"temperature": "warm" * 999}, {"do_sample": True, "min_p": 2}, {"top_k": True}, {"top_k": 10**400}],
)
def test_a_generation_config_out_of_range_is_one_sentence(generation):
    with pytest.raises(PipelineError, match=r"generation_config.json and compile it again$") as error:
        model_sampling(generation)
    assert len(str(error.value)) < 300


@given(st.dictionaries(st.sampled_from([*OWN, "min_p"]), st.none() | st.booleans() | st.floats() | st.integers() | st.text()))
def test_no_generation_config_is_more_than_refused(generation):
    try:
        found = model_sampling(generation)
    except PipelineError:
        return
    assert in_words(found or Sampling())


def test_a_chat_takes_the_models_own_and_shows_it(bundle, monkeypatch, capsys):
    from castiron.pipelines.commands import chat, console

    found = []
    monkeypatch.setattr(console.Console, "run", lambda self: found.append(self.chat.sampler.sampling) or 0)
    monkeypatch.setattr(chat.sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    for more in ([], ["--temperature", "0"], ["--top-k", "3", "--seed", "1"], ["--speculate", "ngram"]):
        assert cli.main(["chat", str(bundle), *more, "--threads", "1"]) == 0
    shown = capsys.readouterr().err
    own = model_sampling(OWN)
    assert found[:3] == [own, replace(own, temperature=0), replace(own, top_k=3, seed=1)]
    assert "temperature 0.7, top-k 20, top-p 0.8, repeat-penalty 1.05" in shown and "greedy, repeat-penalty 1.05" in shown
    # Proposals change no choice, drawn ones either.
    assert found[3] == own


def test_run_is_greedy_whatever_the_model_says_and_its_help_says_so(bundle, tmp_path, capsys):
    plain = toy_text.write(tmp_path / "plain")
    found = []
    for path in (bundle, plain):
        assert cli.main(["run", str(path), "abc", "-n", "9", "--ignore-eos", "--json"]) == 0
        found.append(read_json(capsys.readouterr().out)["tokens"])
    assert found[0] == found[1]
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    assert "Greedy, whatever the model's own" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", ["run", "chat"])
@pytest.mark.parametrize(
    ("argv", "named"),
    [(["--top-k", "5"], "--top-k"), (["--top-p", "0.9"], "--top-p"), (["--min-p", "0.1"], "--min-p"), (["--seed", "3"], "--seed"),
     (["--seed", "3", "--top-k", "5"], "--top-k and --seed")],
)  # fmt: skip
def test_options_that_need_a_temperature_are_not_passed_over(tmp_path_factory, command, argv, named, capsys):
    path = tmp_path_factory.getbasetemp() / "greedy"
    if not path.exists():
        toy_text.write(path)
    prompt = ["abc", "-n", "1"] if command == "run" else ["--threads", "1"]
    assert cli.main([command, str(path), *prompt, *argv]) == 1
    assert f"{named} change" in (error := capsys.readouterr().err) and "--temperature 1" in error and error.count("\n") == 1
    if command == "run":
        # Who says that it is to be greedy has said what they want.
        assert cli.main([command, str(path), *prompt, *argv, "--temperature", "0"]) == 0
        assert f"{named} change" in capsys.readouterr().err
        assert cli.main([command, str(path), *prompt, *argv, "--temperature", "1"]) == 0
        assert "change" not in capsys.readouterr().err


def test_a_server_takes_the_models_own_where_a_request_says_nothing(bundle, tmp_path):
    asked = []

    def listening(app):
        submit = app.api.engine.submit
        app.api.engine.submit = lambda sequences, tell: asked.extend(sequences) or submit(sequences, tell)
        return app

    body = {"prompt": "abc", "max_tokens": 2, "ignore_eos": True}
    for path, own in ((bundle, model_sampling(OWN)), (toy_text.write(tmp_path / "plain"), Sampling(1.0))):
        with TestClient(listening(open_app(open_bundle(path), threads=1))) as client:
            (model,) = client.get("/v1/models").json()["data"]
            assert Sampling(**model["sampling"]) == own
            for more in ({}, {"temperature": 0.5}, {"top_k": 0, "repetition_penalty": 1, "min_p": 0.1}):
                assert client.post("/v1/completions", json={**body, **more}).status_code == 200
        found = [replace(sequence.sampler.sampling, logit_bias={}) for sequence in asked[-3:]]
        expected = [own, replace(own, temperature=0.5), replace(own, top_k=0, repeat_penalty=1, min_p=0.1)]
        assert found == expected
