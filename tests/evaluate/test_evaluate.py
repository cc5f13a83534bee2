"""Test castiron evaluate: llama.cpp's statistics by their definitions, HF's logits on small
models, and errors."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.evaluate import perplexity
from castiron.pipelines.evaluate.perplexity import Compared, bundle_logits, chunks_of, compare_row, log_softmax
from castiron.reference import hf
from castiron.vmfb.bundle.bundle import open_bundle
from castiron.vmfb.cpu_features import host_features
from castiron.vmfb.run.session import Session
from castiron.vmfb.targets import TILES
from tests.support import served, tiny_gguf
from tests.support.toy_text import read_json

CHUNK, CHUNKS = 48, 5
OPTIONS = Options(context=served.CONTEXT, batch=(), verify_widths=(4, 8), lowering="portable")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return served.checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def disturbed_checkpoint(checkpoint, tmp_path_factory):
    """Write the same model with small random changes of every matrix."""
    import torch

    model, location = hf.load(checkpoint, 1), tmp_path_factory.mktemp("models") / "disturbed"
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(location)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (location / name).write_bytes((checkpoint / name).read_bytes())
    return location


@pytest.fixture(scope="module")
def bundle(checkpoint, tmp_path_factory):
    return str(compile_model(checkpoint, tmp_path_factory.mktemp("bundle") / "tiny", OPTIONS).bundle)


@pytest.fixture(scope="module")
def disturbed(disturbed_checkpoint, tmp_path_factory):
    return str(compile_model(disturbed_checkpoint, tmp_path_factory.mktemp("bundle") / "disturbed", OPTIONS).bundle)


@pytest.fixture(scope="module")
def model(checkpoint):
    return hf.load(checkpoint, 1)


def evaluate(*argv: str) -> list[str]:
    return ["evaluate", *argv, "-c", str(CHUNK), "--chunks", str(CHUNKS)]


def result(capsys, *argv: str) -> dict:
    assert cli.main([*evaluate(*argv), "--json"]) == 0
    return read_json(capsys.readouterr().out)


def complaint(capsys, *argv: str) -> str:
    assert cli.main(["evaluate", *argv]) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return error


def softmax(logits: np.ndarray) -> np.ndarray:
    exponents = np.exp(logits.astype(np.float64))
    return exponents / exponents.sum(-1, keepdims=True)


def definitions(logits: np.ndarray, base: np.ndarray, tokens: np.ndarray) -> dict:
    """Return llama.cpp's statistics from sums in its way; logits of both are `[tokens, vocab]`."""
    rows, n = np.arange(len(tokens)), len(tokens)
    q, p = softmax(logits), softmax(base)
    nll, nll_base = -np.log(q[rows, tokens]), -np.log(p[rows, tokens])

    def mean(values):
        mean = values.sum() / n
        return mean, np.sqrt((np.square(values).sum() / n - mean**2) / (n - 1))

    covariance = ((nll * nll_base).sum() / n - nll.mean() * nll_base.mean()) / (n - 1)
    (log_ppl, error), (log_base, base_error) = mean(nll), mean(nll_base)
    ppl, ppl_base = np.exp(log_ppl), np.exp(log_base)
    ln_error = np.sqrt(error**2 + base_error**2 - 2 * covariance)
    kld = (p * np.log(p / q)).sum(-1)
    delta_p = q[rows, tokens] - p[rows, tokens]
    square, square_error = mean(delta_p**2)
    same = (logits.argmax(-1) == base.argmax(-1)).mean()
    order = {"maximum": kld.max(), "99.0%": np.quantile(kld, 0.99), "90.0%": np.quantile(kld, 0.9), "median": np.median(kld)}
    pair = lambda mean, error: {"mean": mean, "error": error}
    return {
        "ppl": pair(ppl, ppl * error),
        "ppl_base": pair(ppl_base, ppl_base * base_error),
        "ppl_ratio": pair(ppl / ppl_base, ppl / ppl_base * ln_error),
        "kld": pair(*mean(kld)) | order,
        "rms_delta_p": pair(np.sqrt(square), 0.5 / np.sqrt(square) * square_error),
        "same_top_p": pair(same, np.sqrt(same * (1 - same) / (n - 1))),
    }


def compare_rows(logits, base, tokens) -> Compared:
    return Compared(*map(np.array, zip(*map(compare_row, logits, base, tokens))))


def assert_equal(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=tolerance, abs=tolerance), name


@pytest.mark.parametrize("seed", range(3))
def test_statistics_are_those_of_their_definitions(seed):
    random = np.random.default_rng(seed)
    base = (3 * random.standard_normal((137, 61))).astype(np.float32)
    logits = (base + 0.4 * random.standard_normal(base.shape)).astype(np.float32)
    tokens = random.integers(61, size=137)
    found = perplexity.statistics(compare_rows(logits, base, tokens))
    assert_equal(found, definitions(logits, base, tokens), 1e-10)
    assert found["ppl"] == pytest.approx(
        perplexity.perplexity(np.array([-log_softmax(row)[token] for row, token in zip(logits, tokens)]))
    )


def test_large_logits_do_not_overflow_and_few_values_have_error_0():
    logits = np.array([[1e4, 0, -1e4], [2e4, 1.5e4, 3e4]], np.float32)
    found = compare_rows(logits, logits, [0, 1])
    assert found.nll.tolist() == found.nll_base.tolist() == [0, 1.5e4] and found.kld.tolist() == [0, 0]
    statistics = perplexity.statistics(compare_rows(logits, logits, [0, 2]))
    assert statistics["kld"]["error"] == statistics["ppl_ratio"]["error"] == statistics["rms_delta_p"]["error"] == 0


def test_chunks_are_llama_cpps():
    """Chunks are complete. Tokens after the first half and one more are scored. Each chunk begins
    with BOS if the text does."""
    tokens = list(range(100, 100 + 23))
    found = chunks_of(tokens, 8)
    assert [chunk.tokens for chunk in found] == [tokens[:7], tokens[8:15]]
    assert [(chunk.first, chunk.targets) for chunk in found] == [(4, tokens[5:8]), (4, tokens[13:16])]
    assert chunks_of(tokens, 9, 1)[0].targets == tokens[5:9] and len(chunks_of(tokens, 8, 1)) == 1
    assert chunks_of(tokens, 8, bos=1) == found
    assert [chunk.tokens[0] for chunk in chunks_of([1, *tokens], 8, bos=1)] == [1, 1, 1]
    assert [len(chunk.targets) for chunk in chunks_of(range(99), 4, 1)] == [1]


@pytest.mark.parametrize("widths", [(), (4,), (4, 8)])
@pytest.mark.parametrize(("count", "first"), [(47, 24), (3, 2), (7, 0)])
def test_rows_are_hfs_logits_with_any_verify_functions(bundle, model, widths, count, first):
    opened = open_bundle(bundle)
    functions = tuple(f for f in opened.manifest.functions if f.role != "verify" or f.width in widths)
    session = Session(replace(opened, manifest=replace(opened.manifest, functions=functions)), 1)
    tokens = [int(token) for token in np.random.default_rng(count).integers(3, session.vocab, size=count)]
    expected = hf.logits(model, tokens)[first:]
    for rows in (bundle_logits(session), bundle_logits(session, steps=True)):
        found = np.array([row.copy() for row in rows(tokens, first)])
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, atol=2e-4)


def chunks_and_logits(bundle: str, *models):
    """Return the scored tokens of these tests' chunks, and their logits `[tokens, vocab]` from each
    HF model."""
    opened = open_bundle(bundle)
    chunks = chunks_of(perplexity.tokens_of(opened), CHUNK, CHUNKS, opened.manifest.tokens.bos)
    wanted = np.concatenate([chunk.targets for chunk in chunks])
    return wanted, *(np.concatenate([hf.logits(m, c.tokens)[c.first :] for c in chunks]) for m in models)


def test_perplexity_is_torchs(bundle, model, capsys):
    import torch

    found = result(capsys, bundle)
    wanted, logits = chunks_and_logits(bundle, model)
    loss = torch.nn.functional.cross_entropy(torch.tensor(logits).double(), torch.tensor(wanted))
    assert found["ppl"]["mean"] == pytest.approx(float(loss.exp()), rel=1e-5)
    assert found["tokens"] == len(wanted) == CHUNKS * 23 and found["chunks"] == CHUNKS and found["context"] == CHUNK
    assert found["base"] is None and found["text"] == "evaluate_text.txt"
    assert (found["numerics"], found["kv_cache_type"]) == ("exact", "f32")
    assert cli.main(evaluate(bundle)) == 0
    assert f"PPL = {found['ppl']['mean']:.4f} +/- {found['ppl']['error']:.5f}" in capsys.readouterr().out


def test_a_bundle_against_itself_has_no_distance(bundle, capsys):
    base = result(capsys, bundle, "--against", bundle)["base"]
    for name in ("kld", "rms_delta_p"):
        assert max(map(abs, base[name].values())) < 1e-12
    assert base["ppl_ratio"] == base["same_top_p"] == {"mean": 1, "error": 0}


def test_the_distance_of_a_disturbed_copy_equals_hfs(bundle, disturbed, model, disturbed_checkpoint, capsys):
    found = result(capsys, disturbed, "--against", bundle)
    wanted, logits, base = chunks_and_logits(bundle, hf.load(disturbed_checkpoint, 1), model)
    expected = definitions(logits, base, wanted)
    assert expected["kld"]["mean"] > 1e-3 and expected["same_top_p"]["mean"] < 1
    got = {**found["base"], "ppl_base": found["base"]["ppl"], "ppl": found["ppl"]}
    assert got.pop("name") == f"{bundle} (exact)"
    assert_equal(got, expected, 2e-4)


def test_the_distance_from_hf_is_f32_rounding(bundle, capsys):
    base = result(capsys, bundle, "--against", "hf")["base"]
    assert base["name"] == "HF transformers" and abs(base["kld"]["maximum"]) < 1e-8
    assert base["same_top_p"]["mean"] == 1


@pytest.fixture
def llama_cpp(monkeypatch, disturbed):
    """Replace llama-cpp-python by a class that runs the disturbed bundle."""

    class Llama:
        def __init__(self, path, n_ctx, n_threads, n_threads_batch, logits_all, verbose):
            assert logits_all and path.endswith(".gguf")
            assert library.llama_model_default_params().use_extra_bufts == (TILES not in host_features())
            self.session, self.scores = Session(disturbed, 1), np.zeros((n_ctx, 211), np.float32)

        @property
        def n_tokens(self):
            return self.session.position

        def reset(self):
            self.session.rewind(0)

        def eval(self, tokens):
            for token in tokens:
                self.session.step(token)
                self.scores[self.session.position - 1] = self.session.logits()

    library = SimpleNamespace(llama_model_default_params=lambda: SimpleNamespace(use_extra_bufts=True))
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama, llama_cpp=library))


def test_llama_cpp_as_the_base_gives_logits_of_every_position(bundle, disturbed, llama_cpp, tmp_path, capsys):
    (tmp_path / "model.gguf").touch()
    found = result(capsys, bundle, "--against", "llama.cpp", "--checkpoint", str(tmp_path / "model.gguf"))["base"]
    expected = result(capsys, bundle, "--against", disturbed)["base"]
    assert found.pop("name") == "llama.cpp" and expected.pop("name")
    assert_equal(found, expected, 1e-4)
    assert "is a directory" in complaint(capsys, bundle, "--against", "llama.cpp", "-c", "48")


def test_the_table_has_llama_cpps_lines(bundle, disturbed, capsys):
    assert cli.main(evaluate(disturbed, "--against", bundle)) == 0
    lines = capsys.readouterr().out.splitlines()
    found = result(capsys, disturbed, "--against", bundle)
    kld, delta_p = found["base"]["kld"], found["base"]["rms_delta_p"]
    for line in (
        f"Mean PPL(Q)          : {found['ppl']['mean']:10.6f} ± {found['ppl']['error']:10.6f}",
        f"Mean    KLD: {kld['mean']:10.6f} ± {kld['error']:10.6f}",
        f"99.0%   KLD: {kld['99.0%']:10.6f}",
        f"Maximum KLD: {kld['maximum']:10.6f}",
        f"RMS Δp    : {100 * delta_p['mean']:6.3f} ± {100 * delta_p['error']:5.3f} %",
    ):
        assert line in lines
    assert any(line.startswith("Same top p: ") for line in lines)


def test_the_last_line_feed_of_a_text_is_ignored(bundle, tmp_path, capsys):
    found = []
    for name, end in (("with", "\n"), ("without", "")):
        (tmp_path / name).write_text("Once upon a time there was. " * 40 + end, encoding="utf-8")
        found.append(result(capsys, bundle, "--text", str(tmp_path / name)))
    assert found[0]["ppl"] == found[1]["ppl"] and found[0]["text"] == str(tmp_path / "with")


def test_invalid_arguments_are_rejected(bundle, tmp_path, capsys):
    short, latin = tmp_path / "short", tmp_path / "latin"
    short.write_text("few words")
    latin.write_bytes(b"caf\xe9 " * 99)
    for argv, words in (
        (["-c", "5120"], "--context is 5120; "),
        (["-c", "3"], "--context is 3"),
        (["-c", "48", "--chunks", "0"], "--chunks is 0"),
        (["-c", "48", "--text", str(short)], "9 tokens, and chunks of 48 need at least 96"),
        (["-c", "48", "--text", str(latin)], "latin is not UTF-8 text"),
        (["-c", "48", "--text", str(tmp_path / "none")], "No such file"),
        (["-c", "48", "--against", str(tmp_path)], "not a bundle"),
    ):
        assert words in complaint(capsys, bundle, *argv), argv


def test_a_base_with_other_tokens_or_a_short_context_is_rejected(bundle, checkpoint, tmp_path, capsys):
    options = replace(OPTIONS, verify_widths=(), context=32, max_context=64)
    other = compile_model(tiny_gguf.write_llama(tmp_path / "other.gguf"), tmp_path / "other", options).bundle
    assert "have different vocabularies" in complaint(capsys, bundle, "-c", "24", "--against", str(other))
    small = compile_model(checkpoint, tmp_path / "small", options).bundle
    assert "supports 1 to 64 positions" in complaint(capsys, bundle, "-c", "96", "--against", str(small))
    # A chunk may be longer than the default context.
    assert cli.main(["evaluate", str(small), "-c", "48", "--chunks", "1", "--against", bundle]) == 0
    # A bundle without a tokenizer gets random token ids.
    assert "has no tokenizer" in complaint(capsys, str(other), "-c", "24", "--text", __file__)
    assert cli.main(["evaluate", str(other), "-c", "24", "--chunks", "2", "--json"]) == 0
    assert read_json(capsys.readouterr().out)["text"] == "random tokens"


def test_the_text_is_long_enough_and_plain():
    text = perplexity.text_of()
    assert 30_000 < len(text.encode()) < 60_000 and text.isascii() and not text.endswith("\n")
    assert text.startswith("CHAPTER I\n\nDown the Rabbit-Hole") and "Gutenberg" not in text
