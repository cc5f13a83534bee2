"""In every family: logits at each position of a chunk, logits of a batch, and hidden states."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.abi import LOWERINGS
from castiron.emitter.lowering import lower
from castiron.emitter.models import FAMILIES
from castiron.reference import hf
from tests.emitter.family_harness import TOLERANCE, Model, check_rows, pair, prompt
from tests.emitter.test_models import shape

WIDTH, SEQUENCES = 5, 2


@pytest.fixture(scope="module", params=[(family, lowering) for family in FAMILIES for lowering in LOWERINGS], ids="-".join)
def rows(request, tmp_path_factory):
    """HF's model, a prompt, and our model with functions for several rows."""
    family, lowering = request.param
    models = pair(family, tmp_path_factory.mktemp(family), **shape(family))
    module = lower(models.layers(verify=(WIDTH,), batches=(SEQUENCES,), embeds=(16,)), lowering)
    vocab = models.checkpoint.config["vocab_size"]
    assert all(op.results[0].shape[-1:] != (vocab,) for op in module.functions["embed_16"].ops), "embed computes the head"
    return models.oracle, prompt(vocab, 32), Model(models.checkpoint, module)


def test_a_chunk_has_logits_at_every_position(rows):
    oracle, tokens, ours = rows
    expected, start = hf.logits(oracle, tokens), len(tokens) - WIDTH
    ours.reset()
    ours.prefill(tokens[:start], 16)
    argmax, logits = ours.call(f"verify_{WIDTH}", np.array(tokens[start:], np.int32), np.int32(start))
    check_rows(logits, expected[start:])
    np.testing.assert_array_equal(argmax, expected[start:].argmax(1))


def test_sequences_of_a_batch_do_not_meet(rows):
    oracle, tokens, ours = rows
    sequences = [tokens[:27], tokens[9:13]]
    expected = [hf.logits(oracle, sequence)[-1] for sequence in sequences]
    single = []
    for sequence in sequences:
        ours.reset()
        ours.prefill(sequence[:-1], 16)
        single.append(ours.caches)
    ours.caches = [np.concatenate(caches) for caches in zip(*single)]
    last = np.array([sequence[-1] for sequence in sequences], np.int32)
    positions = np.array([len(sequence) - 1 for sequence in sequences], np.int32)
    argmax, logits = ours.call(f"decode_batch_{SEQUENCES}", last, positions)
    check_rows(logits, expected)
    np.testing.assert_array_equal(argmax, [wanted.argmax() for wanted in expected])


def test_hidden_states_are_those_of_hf_in_chunks_that_need_not_be_full(rows):
    oracle, tokens, ours = rows
    # Names of the last norm in GPT-2, most families, LFM2, Falcon-H1 and Nemotron-H.
    names = ("transformer.ln_f", "model.norm", "model.embedding_norm", "model.final_layernorm", "model.norm_f")
    modules = dict(oracle.named_modules())
    last = next(name for name in names if name in modules)
    expected = hf.activations(oracle, tokens, [last])[last]
    ours.reset()
    found = []
    for start, count in ((0, 16), (16, 9), (25, 7)):
        chunk = np.full(16, 3, np.int32)
        chunk[:count] = tokens[start : start + count]
        (hidden,) = ours.call("embed_16", chunk, np.int32(start), np.int32(count))
        found.append(hidden[:count])
    assert np.abs(np.concatenate(found) - expected).max() / np.abs(expected).max() < TOLERANCE
