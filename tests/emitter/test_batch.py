"""Batched decoding and logits at every position give each sequence what it gets alone."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.lowering import LOWERINGS, lower
from castiron.emitter.models import build
from castiron.reference import interpreter
from tests.emitter.test_lowering import CONFIG, CONTEXT, params_of

LAYERS = CONFIG["num_hidden_layers"]


@pytest.fixture(scope="module", params=LOWERINGS)
def program(request):
    model = build(CONFIG, lambda name: "q4_1", CONTEXT, [], verify=[4], batches=[3])
    module = lower(model, request.param)
    params = params_of(module, model)
    return lambda name, *args: interpreter.run(module, name, list(args), params)


def decode(program, tokens):
    """Logits after every token, argmax likewise, and the caches, one token at a time."""
    k = v = np.zeros((LAYERS, CONTEXT, 2, 16), np.float32)
    logits, best = [], []
    for position, token in enumerate(tokens):
        index, row, k, v = program("decode_step", np.int32(token), np.int32(position), k, v)
        logits.append(row)
        best.append(int(index))
    return np.stack(logits), best, k, v


def test_a_batch_gives_each_sequence_what_it_gets_alone(program):
    sequences = [[5, 3, 9, 1, 7], [2], [8, 8, 1]]
    alone = [decode(program, tokens) for tokens in sequences]
    before = [decode(program, tokens[:-1]) if tokens[1:] else None for tokens in sequences]
    empty = np.zeros((LAYERS, CONTEXT, 2, 16), np.float32)
    k, v = (np.concatenate([b[i] if b else empty for b in before]) for i in (2, 3))
    tokens = np.array([s[-1] for s in sequences], np.int32)
    positions = np.array([len(s) - 1 for s in sequences], np.int32)
    best, logits, k, v = program("decode_batch_3", tokens, positions, k, v)
    for i, (rows, indices, k_alone, v_alone) in enumerate(alone):
        np.testing.assert_allclose(logits[i], rows[-1], atol=1e-5)
        assert best[i] == indices[-1]
        mine = slice(i * LAYERS, (i + 1) * LAYERS)
        np.testing.assert_allclose(k[mine], k_alone, atol=1e-5)
        np.testing.assert_allclose(v[mine], v_alone, atol=1e-5)


def test_verify_gives_the_logits_of_every_position(program):
    rows, indices, k_alone, _ = decode(program, [4, 2, 6, 5])
    k = v = np.zeros((LAYERS, CONTEXT, 2, 16), np.float32)
    tokens = np.array([4, 2, 6, 5], np.int32)
    best, logits, k, _ = program("verify_4", tokens, np.int32(0), k, v)
    np.testing.assert_allclose(logits, rows, atol=1e-5)
    assert best.tolist() == indices
    np.testing.assert_allclose(k[:, :4], k_alone[:, :4], atol=1e-5)
