"""Embeddings by a generating model are HF's hidden states, pooled."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import castiron
from castiron.emitter.graph.types import EmitError
from castiron.pipelines.compile.open_model import options_of
from castiron.pipelines.errors import PipelineError
from castiron.reference import hf
from castiron.vmfb.device.program import SessionError
from castiron.vmfb.run.session import Session
from tests.support import served, toy_text


@pytest.fixture(scope="module")
def embedding(path, tmp_path_factory):
    """Return a model with embed_8, and a function from text to HF's states [tokens, hidden]."""
    checkpoint = path.parent / "checkpoint"
    out = tmp_path_factory.mktemp("embedding") / "bundle"
    castiron.compile(checkpoint, out, context=served.CONTEXT, batch=4, verify_widths=None, embed=8)
    oracle = hf.load(checkpoint, threads=1)
    with castiron.load(out, threads=1) as model:
        states = lambda text: hf.activations(oracle, model.tokenizer.encode(text), ["model.norm"])["model.norm"]
        yield model, states


def test_embeddings_are_hf_hidden_states_pooled(embedding):
    model, states = embedding
    texts = ["Hello", "Hello there", "a longer text, of several calls and a rest", "x" * 120]
    expected = {"mean": [states(text).mean(0) for text in texts], "last": [states(text)[-1] for text in texts]}
    for pooling, rows in expected.items():
        found = model.embed(texts, pooling=pooling, normalise=False)
        assert found.dtype == np.float32 and found.shape == (4, model.bundle.manifest.hidden)
        np.testing.assert_allclose(found, np.stack(rows), atol=2e-5 * np.abs(rows).max())
        np.testing.assert_array_equal(found[1], model.embed(model.tokenizer.encode(texts[1]), pooling=pooling, normalise=False))
        of_length_one = found / np.linalg.norm(found, axis=1, keepdims=True)
        np.testing.assert_allclose(model.embed(texts, pooling=pooling), of_length_one, rtol=1e-5)
    assert model.embed([]).shape == (0, model.bundle.manifest.hidden)


def test_embedding_does_not_change_answers(embedding, reference):
    model, _ = embedding
    stream = model.stream("Hello", max_tokens=20, stop_tokens=())
    pieces = [next(stream)]
    wanted = model.embed(["Hello there"])
    with ThreadPoolExecutor(2) as pool:
        found = [pool.submit(model.embed, ["Hello there"]) for _ in range(6)]
        pieces += list(stream)
        for one in found:
            np.testing.assert_array_equal(one.result(), wanted)
    assert "".join(pieces) == reference.generate("Hello", 20)


def test_rejects_texts_that_cannot_be_embedded(embedding, tmp_path):
    model, _ = embedding
    for text, why in (("", "0 tokens"), ("x" * 121, "121 tokens; a text to embed must have 1 to 120"), ([999], "vocabulary")):
        with pytest.raises(PipelineError, match=why):
            model.embed([text])
    with pytest.raises(PipelineError, match="unknown pooling: 'max'; use mean or last"):
        model.embed("x", pooling="max")
    session = Session(model.bundle, 1)
    session.step(1)
    session.embed([1] * 8)
    assert session.position == 9
    wrong = (
        ([], "no tokens"),
        ([999], "vocabulary"),
        ([1] * 118, "past the context"),
        ([1] * 114, "embed functions pad 114 to 120"),
    )
    for tokens, why in wrong:
        with pytest.raises(SessionError, match=why):
            session.embed(tokens)
    with pytest.raises(SessionError, match="no logits"):
        session.logits()
    with pytest.raises(SessionError, match="--embed"):
        Session(toy_text.write(tmp_path / "toy"), 1).embed([1])
    with pytest.raises(EmitError, match="give distinct sizes from 2 to 512"):
        options_of(embed=1)
