"""Batched decoding and logits at every position give each sequence what it gets alone."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.caches import CACHES
from castiron.emitter.lowering import LOWERINGS, lower
from castiron.emitter.models import build
from castiron.reference import interpreter
from tests.emitter.test_lowering import CONFIG, CONTEXT, params_of

LAYERS = CONFIG["num_hidden_layers"]


@pytest.fixture(scope="module", params=CACHES)
def cache(request):
    return request.param


@pytest.fixture(scope="module", params=LOWERINGS)
def program(request, cache):
    model = build(CONFIG, lambda name: "q4_1", CONTEXT, [], verify=[4], batches=[3], cache=cache)
    module = lower(model, request.param)
    params = params_of(module, model)
    return lambda name, *args: interpreter.run(module, name, list(args), params)


@pytest.fixture(scope="module")
def empty(cache):
    type_ = CACHES[cache].type(LAYERS, CONTEXT, 2, 16)
    return np.zeros(type_.shape, type_.dtype.numpy)


@pytest.fixture(scope="module")
def near(cache):
    """Close, as sums in another order are; a key beside the middle of two that a cache holds may be rounded to either."""

    def compare(got, wanted):
        if got.ndim > 2:
            got, wanted = (CACHES[cache].values(rows) for rows in (got, wanted))
        limit = {"f32": 0.0, "f16": 2.0**-10, "q8_0": 2.0**-7}[cache] * np.abs(wanted).max()
        np.testing.assert_allclose(got, wanted, atol=max(limit, 1e-5))

    return compare


def decode(program, tokens, empty):
    """Logits after every token, argmax likewise, and the caches, one token at a time."""
    k = v = empty
    logits, best = [], []
    for position, token in enumerate(tokens):
        index, row, k, v = program("decode_step", np.int32(token), np.int32(position), k, v)
        logits.append(row)
        best.append(int(index))
    return np.stack(logits), best, k, v


def test_a_batch_gives_each_sequence_what_it_gets_alone(program, empty, near):
    sequences = [[5, 3, 9, 1, 7], [2], [8, 8, 1]]
    alone = [decode(program, tokens, empty) for tokens in sequences]
    before = [decode(program, tokens[:-1], empty) if tokens[1:] else None for tokens in sequences]
    k, v = (np.concatenate([b[i] if b else empty for b in before]) for i in (2, 3))
    tokens = np.array([s[-1] for s in sequences], np.int32)
    positions = np.array([len(s) - 1 for s in sequences], np.int32)
    best, logits, k, v = program("decode_batch_3", tokens, positions, k, v)
    for i, (rows, indices, k_alone, v_alone) in enumerate(alone):
        near(logits[i], rows[-1])
        assert best[i] == indices[-1]
        mine = slice(i * LAYERS, (i + 1) * LAYERS)
        near(k[mine], k_alone)
        near(v[mine], v_alone)


def test_verify_gives_the_logits_of_every_position(program, empty, near):
    rows, indices, k_alone, _ = decode(program, [4, 2, 6, 5], empty)
    k = v = empty
    tokens = np.array([4, 2, 6, 5], np.int32)
    best, logits, k, _ = program("verify_4", tokens, np.int32(0), k, v)
    near(logits, rows)
    assert best.tolist() == indices
    near(k[:, :4], k_alone[:, :4])
