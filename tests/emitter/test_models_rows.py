"""Several rows at once, in every family: logits at each position of a chunk and of one token of
several sequences, and hidden states.
"""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.lowering import LOWERINGS, lower
from castiron.emitter.models import FAMILIES, build
from castiron.pipelines.compile.weights import pack_parameter
from castiron.reference import hf, interpreter
from tests.emitter.family_harness import CONTEXT, TOLERANCE, WIDTHS, Agreement, pair, prompt
from tests.emitter.test_models import shape

WIDTH, SEQUENCES = 5, 2


@pytest.fixture(scope="module", params=[(family, lowering) for family in FAMILIES for lowering in LOWERINGS], ids="-".join)
def rows(request, tmp_path_factory):
    """HF's model, a prompt, and `run(function, *inputs)` of ours."""
    family, lowering = request.param
    models = pair(family, tmp_path_factory.mktemp(family), **shape(family))
    checkpoint = models.checkpoint
    codec = lambda name: checkpoint.tensors[name].codec if name in checkpoint.tensors else "f32"
    module = lower(build(checkpoint.config, codec, CONTEXT, WIDTHS, (WIDTH,), (SEQUENCES,), embeds=(16,)), lowering)
    params = {p.name: pack_parameter(checkpoint, p) for p in module.params.values()}

    def run(function: str, *inputs: np.ndarray) -> list[np.ndarray]:
        return interpreter.run(module, function, inputs, params)

    vocab = checkpoint.config["vocab_size"]
    assert all(op.results[0].shape[-1:] != (vocab,) for op in module.functions["embed_16"].ops), "embed computes the head"
    fresh = [np.zeros(state.shape, np.float32) for state in module.functions["decode_step"].states]
    return models.oracle, prompt(vocab, 32), run, fresh


def prefilled(run, caches: list[np.ndarray], tokens: list[int]) -> list[np.ndarray]:
    """The states, fresh so far, after `tokens`, at most 32 of them."""
    for start in range(0, len(tokens), 16):
        chunk = np.zeros(16, np.int32)
        real = tokens[start : start + 16]
        chunk[: len(real)] = real
        _, _, *caches = run("prefill_16", chunk, np.int32(start), np.int32(len(real)), *caches)
    return caches


def test_a_chunk_has_logits_at_every_position(rows):
    oracle, tokens, run, fresh = rows
    expected, start = hf.logits(oracle, tokens), len(tokens) - WIDTH
    caches = prefilled(run, fresh, tokens[:start])
    argmax, logits, *_ = run(f"verify_{WIDTH}", np.array(tokens[start:], np.int32), np.int32(start), *caches)
    agreement = Agreement()
    for row, wanted in zip(logits, expected[start:], strict=True):
        agreement.add(row, wanted)
    agreement.check()
    np.testing.assert_array_equal(argmax, expected[start:].argmax(1))


def test_sequences_of_a_batch_do_not_meet(rows):
    oracle, tokens, run, fresh = rows
    sequences = [tokens[:27], tokens[9:13]]
    expected = [hf.logits(oracle, sequence)[-1] for sequence in sequences]
    single = [prefilled(run, fresh, sequence[:-1]) for sequence in sequences]
    together = [np.concatenate(caches) for caches in zip(*single)]
    last = np.array([sequence[-1] for sequence in sequences], np.int32)
    positions = np.array([len(sequence) - 1 for sequence in sequences], np.int32)
    argmax, logits, *_ = run(f"decode_batch_{SEQUENCES}", last, positions, *together)
    agreement = Agreement()
    for row, wanted in zip(logits, expected, strict=True):
        agreement.add(row, wanted)
    agreement.check()
    np.testing.assert_array_equal(argmax, [wanted.argmax() for wanted in expected])


def test_hidden_states_are_those_of_hf_in_chunks_that_need_not_be_full(rows):
    oracle, tokens, run, fresh = rows
    # What the head reads: as GPT-2 calls it, most families, LFM2, Falcon-H1 and Nemotron-H.
    names = ("transformer.ln_f", "model.norm", "model.embedding_norm", "model.final_layernorm", "model.norm_f")
    modules = dict(oracle.named_modules())
    last = next(name for name in names if name in modules)
    expected = hf.activations(oracle, tokens, [last])[last]
    caches, found = fresh, []
    for start, count in ((0, 16), (16, 9), (25, 7)):
        chunk = np.full(16, 3, np.int32)
        chunk[:count] = tokens[start : start + count]
        hidden, *caches = run("embed_16", chunk, np.int32(start), np.int32(count), *caches)
        found.append(hidden[:count])
    assert np.abs(np.concatenate(found) - expected).max() / np.abs(expected).max() < TOLERANCE
