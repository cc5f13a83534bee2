"""Test castiron evaluate: llama.cpp's statistics by their definitions, HF's logits on small
models, and errors."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compiler import compile_model
from castiron.pipelines.compile.options import Options
from castiron.pipelines.evaluate import perplexity
from castiron.pipelines.evaluate.perplexity import BundleRows, Compared, chunks_of, compare_row, negative_log_likelihood
from castiron.reference import hf
from castiron.vmfb.bundle import open_bundle
from castiron.vmfb.session import Session
from tests.support import served, tiny_gguf
from tests.support.toy_text import read_json

CHUNK, CHUNKS = 48, 5
OPTIONS = Options(context=served.CONTEXT, batch=(), speculate=(4, 8), lowering="portable")


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

    def order(values, shares):
        found = dict(zip(("mean", "error"), mean(values)))
        found |= {"maximum": values.max(), "median": np.median(values), "minimum": values.min()}
        return found | {f"{share}%": np.quantile(values, share / 100) for share in shares}

    pair = lambda mean, error: {"mean": mean, "error": error}
    return {
        "ppl": pair(ppl, ppl * error),
        "ppl_base": pair(ppl_base, ppl_base * base_error),
        "correlation": covariance / (error * base_error),
        "ln_ppl_ratio": pair(log_ppl - log_base, ln_error),
        "ppl_ratio": pair(ppl / ppl_base, ppl / ppl_base * ln_error),
        "ppl_difference": pair(
            ppl - ppl_base,
            np.sqrt((ppl * error) ** 2 + (ppl_base * base_error) ** 2 - 2 * ppl * ppl_base * covariance),
        ),
        "kld": order(kld, (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)),
        "delta_p": order(delta_p, (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1))
        | {"rms": np.sqrt(square), "rms_error": 0.5 / np.sqrt(square) * square_error},
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
        perplexity.perplexity(np.array([negative_log_likelihood(*row) for row in zip(logits, tokens)]))
    )
    # The order of printing is from the largest to the smallest.
    shares = list(found["kld"].values())[2:]
    assert shares == sorted(shares, reverse=True) and found["kld"]["minimum"] >= 0


def test_large_logits_do_not_overflow_and_few_values_have_error_0():
    logits = np.array([[1e4, 0, -1e4], [2e4, 1.5e4, 3e4]], np.float32)
    found = compare_rows(logits, logits, [0, 1])
    assert found.nll.tolist() == found.nll_base.tolist() == [0, 1.5e4] and found.kld.tolist() == [0, 0]
    statistics = perplexity.statistics(compare_rows(logits, logits, [0, 2]))
    assert statistics["kld"]["error"] == statistics["ln_ppl_ratio"]["error"] == statistics["delta_p"]["rms_error"] == 0


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
    for rows in (BundleRows(session), BundleRows(session, steps=True)):
        found = np.array([row.copy() for row in rows.rows(tokens, first)])
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
    assert (found["numerics"], found["cache"]) == ("exact", "f32")
    assert cli.main(evaluate(bundle)) == 0
    assert f"PPL = {found['ppl']['mean']:.4f} +/- {found['ppl']['error']:.5f}" in capsys.readouterr().out


def test_a_bundle_against_itself_has_no_distance(bundle, capsys):
    base = result(capsys, bundle, "--against", bundle, "-n", "8")["base"]
    for name in ("kld", "delta_p"):
        assert max(map(abs, base[name].values())) < 1e-12
    assert base["ppl_ratio"] == {"mean": 1, "error": 0} and base["ppl_difference"] == {"mean": 0, "error": 0}
    assert base["same_top_p"] == {"mean": 1, "error": 0} and base["correlation"] == pytest.approx(1)
    greedy = base["greedy"]
    assert greedy["tokens"] == 8 and greedy["equal"] == len(greedy["prompts"]) > 1
    assert all(prompt["first_difference"] is None for prompt in greedy["prompts"])
    assert result(capsys, bundle, "--against", bundle, "-n", "0")["base"]["greedy"]["prompts"] == []


def test_the_distance_of_a_disturbed_copy_equals_hfs(bundle, disturbed, model, disturbed_checkpoint, capsys):
    found = result(capsys, disturbed, "--against", bundle, "-n", "8")
    wanted, logits, base = chunks_and_logits(bundle, hf.load(disturbed_checkpoint, 1), model)
    expected = definitions(logits, base, wanted)
    assert expected["kld"]["mean"] > 1e-3 and expected["same_top_p"]["mean"] < 1
    got = {**found["base"], "ppl_base": found["base"]["ppl"], "ppl": found["ppl"]}
    greedy = got.pop("greedy")
    assert got.pop("name") == f"{bundle} (exact)"
    assert_equal(got, expected, 2e-4)
    # The first difference is that of the greedy tokens.
    sides = [served.ReferenceSession(location) for location in (disturbed, bundle)]
    texts = {name: ids for name, ids in prompts_of(bundle)}
    assert greedy["prompts"] and greedy["equal"] < len(greedy["prompts"])
    for prompt in greedy["prompts"]:
        ours, theirs = (side.tokens(texts[prompt["name"]], 8) for side in sides)
        at = next((i for i, pair in enumerate(zip(ours, theirs)) if pair[0] != pair[1]), None)
        assert prompt["first_difference"] == at


def prompts_of(bundle: str):
    from castiron.pipelines.cli.evaluate import prompts_of

    return prompts_of(open_bundle(bundle), 8)


def test_the_distance_from_hf_is_f32_rounding(bundle, capsys):
    base = result(capsys, bundle, "--against", "hf", "-n", "4")["base"]
    assert base["name"] == "HF transformers" and abs(base["kld"]["maximum"]) < 1e-8
    assert base["same_top_p"]["mean"] == 1 and base["greedy"]["equal"] == len(base["greedy"]["prompts"])


@pytest.fixture
def llama_cpp(monkeypatch, disturbed):
    """Replace llama-cpp-python by a class that runs the disturbed bundle."""

    class Llama:
        def __init__(self, path, n_ctx, n_threads, n_threads_batch, logits_all, verbose):
            assert logits_all and path.endswith(".gguf")
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

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Llama))


def test_llama_cpp_as_the_base_gives_logits_of_every_position(bundle, disturbed, llama_cpp, tmp_path, capsys):
    (tmp_path / "model.gguf").touch()
    found = result(capsys, bundle, "--against", "llama.cpp", "--checkpoint", str(tmp_path / "model.gguf"), "-n", "8")["base"]
    expected = result(capsys, bundle, "--against", disturbed, "-n", "8")["base"]
    assert found.pop("name") == "llama.cpp" and expected.pop("name")
    assert found.pop("greedy") == expected.pop("greedy")
    assert_equal(found, expected, 1e-4)
    assert "is a directory" in complaint(capsys, bundle, "--against", "llama.cpp", "-c", "48")


def test_the_table_has_llama_cpps_lines(bundle, disturbed, capsys):
    assert cli.main(evaluate(disturbed, "--against", bundle, "-n", "8")) == 0
    lines = capsys.readouterr().out.splitlines()
    found = result(capsys, disturbed, "--against", bundle, "-n", "8")
    kld, delta_p = found["base"]["kld"], found["base"]["delta_p"]
    for line in (
        f"Mean PPL(Q)                   : {found['ppl']['mean']:10.6f} ± {found['ppl']['error']:10.6f}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * found['base']['correlation']:6.2f}%",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {kld['mean']:10.6f} ± {kld['error']:10.6f}",
        f"99.9%   KLD: {kld['99.9%']:10.6f}",
        f" 5.0%   KLD: {kld['5.0%']:10.6f}",
        f"Minimum KLD: {kld['minimum']:10.6f}",
        f"Median  Δp: {100 * delta_p['median']:6.3f}%",
        f"RMS Δp    : {100 * delta_p['rms']:6.3f} ± {100 * delta_p['rms_error']:5.3f} %",
    ):
        assert line in lines
    assert any(line.startswith("Same top p: ") for line in lines) and any("differs from token" in line for line in lines)


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
        (["-c", "512"], "the bundle has 126 positions"),
        (["-c", "3"], "--context is 3"),
        (["-c", "48", "--chunks", "0"], "--chunks is 0"),
        (["-c", "48", "-n", "-1"], "-n is -1"),
        (["-c", "48", "--text", str(short)], "9 tokens, and chunks of 48 need at least 96"),
        (["-c", "48", "--text", str(latin)], "latin is not text in UTF-8"),
        (["-c", "48", "--text", str(tmp_path / "none")], "No such file"),
        (["-c", "48", "--against", str(tmp_path)], "not a bundle"),
    ):
        assert words in complaint(capsys, bundle, *argv), argv


def test_a_base_with_other_tokens_or_a_short_context_is_rejected(bundle, checkpoint, tmp_path, capsys):
    options = replace(OPTIONS, speculate=(), context=32)
    other = compile_model(tiny_gguf.write_llama(tmp_path / "other.gguf"), tmp_path / "other", options).bundle
    assert "have different tokens" in complaint(capsys, bundle, "-c", "24", "--against", str(other))
    small = compile_model(checkpoint, tmp_path / "small", options).bundle
    assert "has a context of 32, but 48 are needed" in complaint(capsys, bundle, "-c", "48", "-n", "0", "--against", str(small))
    # A bundle without a tokenizer gets random token ids.
    assert "has no tokenizer" in complaint(capsys, str(other), "-c", "24", "--text", __file__)
    assert cli.main(["evaluate", str(other), "-c", "24", "--chunks", "2", "--json"]) == 0
    assert read_json(capsys.readouterr().out)["text"] == "random tokens"


def test_the_text_is_long_enough_and_plain():
    text = perplexity.text_of()
    assert 30_000 < len(text.encode()) < 60_000 and text.isascii() and not text.endswith("\n")
    assert text.startswith("CHAPTER I\n\nDown the Rabbit-Hole") and "Gutenberg" not in text
