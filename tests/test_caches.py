"""Rounded KV caches: less memory, and logits that do not depend on which calls read the tokens."""

from __future__ import annotations

import numpy as np
import pytest

from castiron.emitter.abi import STORAGE, State
from castiron.emitter.graph.types import EmitError
from castiron.emitter.layers.kv_cache import CACHES, stored_as
from castiron.pipelines.cli import main as cli
from castiron.pipelines.compile.compile_model import compile_model
from castiron.pipelines.compile.compile_options import Options
from castiron.pipelines.compile.open_model import cached_path
from castiron.pipelines.engine.memory import needed
from castiron.reference import tiny
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.run.session import Session
from tests.test_end_to_end import prompt

# Gemma has rings of 40 rows: a window of 8, and chunks of 32 tokens.
CONTEXT = {"llama": 160, "gemma3_text": 100}
WINDOWS = {"llama": {}, "gemma3_text": {"sliding_window": 8}}
TOKENS = prompt(60, seed=4)
# Max difference of logits, as a share of their range, from numbers that two calls round to different
# neighbours in the cache.
NEAR = {"f16": 2.0**-11, "q8_0": 2.0**-6}
# Min and max difference of logits between a rounded and an f32 cache, as a share of their range.
MOVED = {"f16": (2.0**-18, 2.0**-6), "q8_0": (2.0**-12, 2.0**-3)}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """`bundles(family, cache, lowering)`, compiled once."""
    folder, made = tmp_path_factory.mktemp("caches"), {}

    def bundle(family: str, cache: str, lowering: str = "kernels") -> Bundle:
        if (family, cache, lowering) not in made:
            checkpoint = folder / family
            if not checkpoint.exists():
                tiny.tiny_model(family, checkpoint, **WINDOWS[family])
            options = Options(context=CONTEXT[family], lowering=lowering, kv_cache_type=cache, batch=(4,), verify_widths=(4,))
            path = folder / f"{family}-{lowering}-{cache}"
            made[family, cache, lowering] = open_bundle(compile_model(checkpoint, path, options).bundle)
        return made[family, cache, lowering]

    return bundle


@pytest.fixture(scope="module", params=NEAR)
def cache(request):
    return request.param


# Full attention and windows, in both lowerings.
COMPILED = {
    "f16": [("llama", "kernels"), ("gemma3_text", "kernels"), ("llama", "portable")],
    "q8_0": [("llama", "kernels"), ("gemma3_text", "kernels"), ("gemma3_text", "portable")],
}


@pytest.fixture(scope="module", params=[(f, c, how) for c, pairs in COMPILED.items() for f, how in pairs], ids="-".join)
def bundle(request, bundles):
    return bundles(*request.param)


@pytest.fixture(scope="module")
def exact(bundles, bundle):
    """Return the bundle with an f32 cache."""
    return bundles(bundle.manifest.config["model_type"], "f32")


@pytest.fixture(scope="module")
def expected(bundle):
    """Return the logits after each of TOKENS, which are read one by one."""
    session, found = Session(bundle, 1), []
    for token in TOKENS:
        session.step(token)
        found.append(session.logits())
    return found


def near(found: np.ndarray, wanted: np.ndarray, cache: str) -> None:
    assert np.abs(found - wanted).max() < NEAR[cache] * np.ptp(wanted)


def agrees(session: Session, expected: list[np.ndarray]) -> None:
    near(session.logits(), expected[session.position - 1], session.manifest.cache)


def test_manifest_and_memory_report_the_cache(bundle, exact, capsys):
    cache, family = bundle.manifest.cache, bundle.manifest.config["model_type"]
    assert cache in bundle.path.name and exact.manifest.cache == "f32"
    assert {state.dtype for state in bundle.manifest.states} == {STORAGE[cache]}
    # Heads have 16 or 24 elements; in q8_0, 16 or 8 of them share a scale of 4 bytes.
    parts = {"f16": 1 / 2, "q8_0": {"llama": 20 / 64, "gemma3_text": 12 / 32}[family]}
    assert needed(bundle.manifest).state == parts[cache] * needed(exact.manifest).state
    session = Session(bundle, 1)
    assert {state.array.dtype for state in session._states} == {CACHES[cache].dtype.numpy}
    full = bundle.with_context(bundle.manifest.max_context).manifest
    assert sum(s.array.nbytes for s in session._states) == needed(full).state
    assert cli.main(["inspect", str(bundle.path)]) == 0
    shown = capsys.readouterr().out
    assert f"{cache} cache" in shown and str(needed(bundle.manifest)) in shown
    kinds = {"positional", "window"} if family == "gemma3_text" else {"positional"}
    assert {state.kind for state in bundle.manifest.states} == kinds
    assert all(f"x{STORAGE[cache]} {kind}" in shown for kind in kinds)


def test_the_rounding_is_bounded(bundle, exact):
    exact, rounded = (Session(bundle, 1) for bundle in (exact, bundle))
    for session in (exact, rounded):
        session.prefill(TOKENS)
    distance = np.abs(exact.logits() - rounded.logits()).max() / np.ptp(exact.logits())
    low, high = MOVED[bundle.manifest.cache]
    assert low < distance < high


@pytest.mark.parametrize("pieces", [[60], [5, 1, 9, 32, 3, 10], [8, 33], [31, 1, 1, 5]])
def test_a_prompt_in_pieces_equals_token_by_token(bundle, expected, pieces):
    session, done = Session(bundle, 1), 0
    for size in pieces:
        session.prefill(TOKENS[done : done + size])
        done += size
        agrees(session, expected)


def test_verify_and_fork(bundle, expected):
    session = Session(bundle, 1)
    session.prefill(TOKENS[:20])
    assert session.verify(TOKENS[20:24]) == [int(e.argmax()) for e in expected[20:24]]
    agrees(session, expected)
    fork = session.fork()
    # The same functions over the same rows give the same bits.
    assert fork.step(TOKENS[24]) == session.step(TOKENS[24])
    np.testing.assert_array_equal(fork.logits(), session.logits())


def test_the_cache_type_is_in_the_bundles_key(bundles, tmp_path):
    checkpoint, out = bundles("llama", "f16").path.parent / "llama", tmp_path / "bundle"
    options = {cache: Options(context=32, kv_cache_type=cache, batch=(), verify_widths=()) for cache in CACHES}
    reports = [compile_model(checkpoint, out, options[cache]) for cache in ("f32", "f16", "f16", "f32")]
    assert [(report.manifest.cache, report.up_to_date) for report in reports] == [
        ("f32", False), ("f16", False), ("f16", True), ("f32", False),
    ]  # fmt: skip
    assert len({cached_path(checkpoint, options) for options in options.values()}) == len(CACHES)


def test_recurrent_states_stay_f32():
    windows = {"positional": 0, "window": 6, "recurrent": 0}
    states = [State(kind, (2, 8, 48), kind=kind, window=window) for kind, window in windows.items()]
    assert [state.dtype for state in stored_as(states, "f16")] == ["f16", "f16", "f32"]
    assert [state.dtype for state in stored_as(states, "q8_0")] == ["i8", "i8", "f32"]
    assert [state.shape for state in stored_as(states, "q8_0")] == [(2, 8, 3, 20), (2, 8, 3, 20), (2, 8, 48)]
    assert stored_as(states, "f32") == tuple(states)
    for refusing in (lambda: stored_as(states, "f8"), lambda: Options(kv_cache_type="f8")):
        with pytest.raises(EmitError, match="cache(_| )type:? 'f8'.* f32, f16, q8_0"):
            refusing()


@pytest.mark.parametrize("head_dim, group", [(64, 32), (128, 32), (80, 16), (24, 8)])
def test_q8_0_rounds_by_half_a_step_of_its_group(head_dim, group):
    how, rng = CACHES["q8_0"], np.random.default_rng(head_dim)
    x = (rng.standard_normal((50, 3, head_dim)) * 10.0 ** rng.integers(-20, 20, (50, 3, 1))).astype(np.float32)
    x[0], x[1, 0, 0] = 0.0, 1e-31
    rows = how.stored(x)
    assert rows.shape == (50, 3, *how.row(head_dim)) and rows.shape[-1] == group + 4 and rows.dtype == np.int8
    step = np.abs(x.reshape(50, 3, -1, group)).max(axis=-1, keepdims=True) / np.float64(127)
    off = np.abs(how.values(rows).astype(np.float64) - x).reshape(50, 3, -1, group)
    assert (off <= step * (0.5 + 1e-4)).all() and (off > 0.45 * step).any()
    assert not how.values(rows)[0].any()
    # The largest number of each group is stored as 127 or -127.
    assert (np.abs(rows[2:, ..., 4:].astype(int)).max(axis=-1) == 127).all()


def test_rejects_heads_without_groups():
    with pytest.raises(
        EmitError, match="^cache type q8_0 does not support head_dim 20, only multiples of 8; use cache type f16 or f32"
    ):
        CACHES["q8_0"].row(20)
    assert CACHES["f16"].row(20) == (20,)
