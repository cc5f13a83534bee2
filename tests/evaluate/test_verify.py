"""Test castiron verify with a replaced HF, its checkpoints and its prompts."""

from __future__ import annotations

import hashlib
import json
from types import SimpleNamespace

import pytest

from castiron.pipelines.checkpoints.open_checkpoint import checkpoint_sha256
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.evaluate import verify
from castiron.pipelines.evaluate.verify import random_prompts, read_prompts
from castiron.reference import hf, tiny
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.run.session import Session
from tests.support import toy_text
from tests.support.toy_text import CONTEXT, read_json

MARGIN = 0.25


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "toy.gguf"
    path.write_bytes(b"a checkpoint")
    return path


@pytest.fixture(scope="module")
def bundle(tmp_path_factory, checkpoint):
    source = {"model": "toy", "path": str(checkpoint), "format": "gguf",
              "sha256": hashlib.sha256(checkpoint.read_bytes()).hexdigest()}  # fmt: skip
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "toy", source=source))


@pytest.fixture(scope="module")
def bare_bundle(tmp_path_factory, checkpoint):
    source = {"model": "toy", "path": str(checkpoint), "format": "gguf"}
    return str(toy_text.write(tmp_path_factory.mktemp("bundle") / "bare", text=False, source=source))


@pytest.fixture
def oracle(monkeypatch, bundle):
    """Replace HF by the toy bundle; `oracle[prompt] = index` changes HF's token at that index."""
    session, wrong = Session(open_bundle(bundle), 1), {}

    def expect(model, tokens, ours):
        session.rewind(0)
        found = [session.prefill(tokens)]
        while len(found) < len(ours):
            found.append(session.step(found[-1]))
        if tuple(tokens) in wrong:
            found[wrong[tuple(tokens)]] ^= 1
        return hf.Greedy(found, [MARGIN + location for location in range(len(ours))])

    monkeypatch.setattr(verify, "expect", expect)
    monkeypatch.setattr(verify, "load_reference", lambda *_: None)
    return wrong


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory):
    return hf.load(tiny.tiny_model("llama", tmp_path_factory.mktemp("tiny") / "llama"), 1)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts"
    path.write_text('abc\r\n\n{"name": "ids", "tokens": [2, 3]}\n{"name": "plain", "prompt": "bc", "raw": true}\n')
    return str(path)


def test_equal_tokens_are_exit_status_0(bundle, prompts, oracle, capsys):
    assert cli.main(["verify", bundle, "--prompts", prompts, "-n", "6", "--json"]) == 0
    result = read_json(capsys.readouterr().out)
    assert result["exact"] and result["compared"] == 3 and result["tokens"] == 6 and result["skipped"] == []
    assert [prompt["name"] for prompt in result["prompts"]] == ["abc", "ids", "plain"]
    # The first prompt is in the chat template, the second is token ids, the third is plain text.
    assert [prompt["prompt_tokens"] for prompt in result["prompts"]] == [5, 2, 2]
    assert all(prompt["first_difference"] is None and len(prompt["tokens"]) == 6 for prompt in result["prompts"])
    assert all(prompt["smallest_hf_margin"] == MARGIN for prompt in result["prompts"])


@pytest.mark.parametrize("location", [0, 3, 5])
def test_one_different_token_is_found_reported_and_exit_status_1(bundle, prompts, oracle, capsys, location):
    oracle[(2, 3)] = location
    assert cli.main(["verify", bundle, "--prompts", prompts, "-n", "6", "--json"]) == 1
    result = read_json(capsys.readouterr().out)
    found = result["prompts"][1]
    assert not result["exact"] and [prompt["exact"] for prompt in result["prompts"]] == [True, False, True]
    assert found["first_difference"] == location and found["castiron"] == found["hf"] ^ 1 == found["tokens"][location]
    assert found["hf_margin"] == MARGIN + location

    assert cli.main(["verify", bundle, "--prompts", prompts, "-n", "6"]) == 1
    out, _ = capsys.readouterr()
    line = next(line for line in out.splitlines() if line.startswith("DIFFERS"))
    assert f"token {location}" in line and str(found["castiron"]) in line and str(found["hf"]) in line and "margin" in line
    assert "2 of 3 prompts exact" in out


@pytest.mark.parametrize("certain", [verify.CERTAIN, float("inf")], ids=["at once", "token by token"])
@pytest.mark.parametrize("wrong", [None, 0, 4, 11])
def test_what_hf_expects_is_its_greedy_text_up_to_the_first_difference(tiny_llama, monkeypatch, certain, wrong):
    calls = []
    step_by_step = hf.greedy
    monkeypatch.setattr(verify, "CERTAIN", certain)
    monkeypatch.setattr(hf, "greedy", lambda *args: calls.append(args) or step_by_step(*args))
    for length in (1, 9):
        prompt = list(range(10, 10 + length))
        greedy = step_by_step(tiny_llama, prompt, 12)
        ours = list(greedy.tokens)
        if wrong is not None:
            ours[wrong] ^= 1
        last = 12 if wrong is None else wrong + 1
        found = verify.expect(tiny_llama, prompt, ours)
        assert found.tokens[:last] == greedy.tokens[:last]
        assert found.margins[:last] == pytest.approx(greedy.margins[:last], abs=1e-4)
    assert bool(calls) == (certain > 1)


def test_skips_and_names_prompts_that_do_not_fit(bundle, tmp_path, oracle, capsys):
    path = tmp_path / "prompts"
    path.write_text(json.dumps({"name": "long", "tokens": [1] * CONTEXT}) + "\nabc\n")
    assert cli.main(["verify", bundle, "--prompts", str(path), "-n", "2", "--json"]) == 0
    result = read_json(capsys.readouterr().out)
    assert result["skipped"] == ["long"] and result["compared"] == 1
    assert cli.main(["verify", bundle, "--prompts", str(path), "-n", "1", "--json"]) == 0
    assert read_json(capsys.readouterr().out)["compared"] == 2


def test_a_bundle_without_tokenizer_is_compared_on_random_tokens(bare_bundle, oracle, capsys):
    assert cli.main(["verify", bare_bundle, "-n", "3", "--json"]) == 0
    result = read_json(capsys.readouterr().out)
    assert result["compared"] >= 10
    assert cli.main(["verify", bare_bundle, "--tokens", "3,4,5", "-n", "3", "--json"]) == 0
    assert read_json(capsys.readouterr().out)["prompts"][0]["prompt_tokens"] == 3


def test_random_prompts_are_the_same_each_time_and_of_many_lengths():
    prompts = random_prompts(1000)
    assert prompts == random_prompts(1000) and len(prompts) >= 24
    lengths = {len(prompt.tokens) for prompt in prompts}
    assert {1, 1000} <= lengths and len(lengths) == len(prompts)
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt.tokens)


def test_rejects_a_checkpoint_that_is_not_the_bundles(bundle, oracle, tmp_path, capsys):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"another checkpoint")
    assert cli.main(["verify", bundle, "--checkpoint", str(other), "-n", "3"]) == 1
    assert "sha256" in capsys.readouterr().err
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(b"a checkpoint")
    assert cli.main(["verify", bundle, "--checkpoint", str(copy), "--tokens", "1", "-n", "3", "--json"]) == 0


def test_the_error_of_a_missing_checkpoint_names_the_option(tmp_path):
    for source in ({"model": "/gone/x.gguf", "path": "/gone/x.gguf"}, {}):
        with pytest.raises(PipelineError, match=f"{source.get('path', 'no path in the manifest')}.*--checkpoint"):
            verify.checkpoint_of(made_from(source, tmp_path))


def made_from(source: dict, location="a bundle") -> SimpleNamespace:
    return SimpleNamespace(path=location, manifest=SimpleNamespace(source=source))


@pytest.fixture
def directory(tmp_path):
    return tiny.tiny_model("llama", tmp_path / "llama")


def test_a_moved_directory_is_accepted_and_a_changed_one_rejected(directory, tmp_path):
    source = {"path": str(directory), "format": "hf", "sha256": checkpoint_sha256(directory)}
    moved = directory.rename(tmp_path / "moved")
    with pytest.raises(PipelineError, match="is missing: .*; give its path with --checkpoint"):
        verify.checkpoint_of(made_from(source))
    (moved / "README.md").write_text("words")
    assert verify.checkpoint_of(made_from(source), str(moved)) == moved
    for name in ("config.json", "model.safetensors"):
        data = bytearray((moved / name).read_bytes())
        data[-2] ^= 1
        (moved / name).write_bytes(data)
        with pytest.raises(PipelineError, match="moved is not the checkpoint that a bundle was compiled from") as error:
            verify.checkpoint_of(made_from(source), str(moved))
        assert "\n" not in str(error.value)
        data[-2] ^= 1
        (moved / name).write_bytes(data)


def test_only_peers_accept_a_checkpoint_in_a_different_format(directory, checkpoint):
    source = {"path": str(directory), "format": "hf", "sha256": checkpoint_sha256(directory)}
    assert verify.checkpoint_of(made_from(source), str(checkpoint), any_format=True) == checkpoint
    with pytest.raises(PipelineError, match="is not the checkpoint"):
        verify.checkpoint_of(made_from(source), str(checkpoint))


def test_a_bundle_finds_its_checkpoint_from_another_directory(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(directory.parent)
    options = Options(context=8, batch=(), verify_widths=(), lowering="portable")
    bundle = compile_model(directory.name, tmp_path / "out", options).bundle
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    opened = open_bundle(bundle)
    assert opened.manifest.source["sha256"] == checkpoint_sha256(directory)
    assert verify.checkpoint_of(opened).samefile(directory)


def test_a_checkpoint_that_transformers_cannot_read_is_one_error_line(checkpoint):
    with pytest.raises(PipelineError, match="transformers cannot read") as error:
        verify.load_reference(checkpoint, "native", 1)
    assert "\n" not in str(error.value)


def test_the_default_prompts_vary_in_length_and_script():
    prompts = read_prompts()
    assert len(prompts) >= 25 and len({prompt.name for prompt in prompts}) == len(prompts)
    words = [len(prompt.text.split()) for prompt in prompts]
    assert min(words) == 1 and max(words) > 700
    assert any(prompt.raw for prompt in prompts) and not all(prompt.raw for prompt in prompts)
    everything = "".join(prompt.text for prompt in prompts)
    scripts = {"Latin": "e", "Cyrillic": "с", "Han": "的", "Kana": "お", "Arabic": "ا", "Devanagari": "क", "emoji": "🚀"}
    assert not [name for name, letter in scripts.items() if letter not in everything]


@pytest.mark.parametrize(
    ("line", "message"),
    [("", "no prompts"), ("{", "not JSON"), ('{"prompt": 1}', "prompt"), ('{"prompt": ""}', "prompt"),
     ('{"tokens": []}', "tokens"), ('{"tokens": [1.5]}', "tokens"), ('{"tokens": [true]}', "tokens"),
     ('{"tokens": [1], "prompt": "x"}', "tokens"), ('{"promt": "x"}', "promt"), ('{"tokens": [-1]}', "tokens")],
)  # fmt: skip
def test_a_prompts_file_with_a_mistake_names_it(tmp_path, line, message):
    path = tmp_path / "prompts"
    path.write_text(f"\n{line}\n")
    with pytest.raises(PipelineError, match=message) as error:
        read_prompts(path)
    assert str(path) in str(error.value)
