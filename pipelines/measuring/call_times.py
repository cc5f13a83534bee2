"""The times of a bundle's calls for a request: measured here, or calculated from what its kernels do and a machine's limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from statistics import median
from time import perf_counter

import numpy as np

from castiron.pipelines.errors import PipelineError
from castiron.pipelines.generation.positions import stand
from castiron.pipelines.generation.scheduler import interleaved
from castiron.pipelines.measuring.plan import Times
from castiron.pipelines.measuring.workload import amount
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.chunks import chunks
from castiron.vmfb.manifest import STATE_ITEM_BYTES, Manifest

# Seconds for which each call is measured, and calls at least.
SECONDS, CALLS = 0.4, 4
# What calls reach of a machine's limits where nothing was measured: of a token alone, of several, and of a prompt.
SHARES = {"decode": 0.75, "batch": 0.8, "prefill": 0.85}


@dataclass(frozen=True)
class Limits:
    """What a machine reads and computes at most (f32, multiply and add counted as two): 10^9 a second."""

    read_gb_s: float
    gflop_s: float


def positions(prompt: int, gen: int) -> int:
    """Where an answer's token stands, on the average."""
    return prompt + gen // 2


def check(manifest: Manifest, prompt: int, gen: int) -> None:
    """PipelineError for a request that the context has no room for."""
    if prompt < 1 or gen < 1 or prompt + gen > manifest.context:
        raise PipelineError(
            f"a request of {prompt} and {gen} tokens does not fit: each must be 1 or more, both at most {manifest.context}, "
            "the bundle's context"
        )


def measured(bundle: Bundle, prompt: int, gen: int, threads: int | None = None) -> Times:
    """On this machine, in a few seconds; the tokens are random."""
    from castiron.vmfb.batch import Batch

    manifest = bundle.manifest
    check(manifest, prompt, gen)
    batch, width = Batch(bundle, threads), interleaved(manifest)
    ids = np.random.default_rng(0).integers(0, manifest.vocab, prompt)
    first = batch.slots[0]

    def read(start: int, tokens: int) -> None:
        if start == 0:
            first.rewind(0)
        first.prefill(ids[start : start + tokens])

    read(0, prompt)
    alone = typical(lambda: read(0, prompt))
    count = ceil(prompt / width)
    # One after another, as it comes between two steps: the mean of all positions.
    chunk = typical(lambda: [read(at, width) for at in range(0, prompt, width)]) / count if count > 1 else alone
    steps, middle = {}, positions(prompt, gen)
    if gen > 1:
        first.prefill(np.resize(ids, middle - first.position))
    for session in batch.slots[1:]:
        stand(session, middle, source=first)
    for active in sorted({1, 2, 3, *manifest.widths("batch"), *(n // 2 + 1 for n in manifest.widths("batch"))}):
        if active <= batch.size:
            # Slots are given away in turn, so that those in use stand side by side, wherever they begin; of one and of all it
            # makes no difference.
            begin = range(batch.size if 1 < active < batch.size else 1)
            steps[active] = typical(lambda: [_step(batch, at, active, middle) for at in begin]) / len(begin)
    return Times(steps, alone, chunk, count, gen)


def _step(batch, first: int, active: int, position: int) -> None:
    batch.step({(first + i) % batch.size: 1 for i in range(active)})
    if max(session.position for session in batch.slots) >= min(batch.slots[0].context, position + 64):
        for session in batch.slots:
            session.rewind(session.reachable(position))


def typical(call) -> float:
    """The median seconds of a call."""
    found, start = [], perf_counter()
    while len(found) < CALLS or perf_counter() - start < SECONDS:
        before = perf_counter()
        call()
        found.append(perf_counter() - before)
    return median(found)


def calculated(manifest: Manifest, prompt: int, gen: int, limits: Limits, shares: Mapping[str, float] = SHARES) -> Times:
    """On a machine with these limits, of which calls reach these shares; PipelineError for a bundle that does not say what its
    kernels do."""
    check(manifest, prompt, gen)
    width, at = interleaved(manifest), positions(prompt, gen)

    def read(widest: int) -> float:
        widths = [w for w in manifest.prefill_widths if w <= widest]
        done, total = 0, 0.0
        for call, count in chunks(prompt, 0, manifest.context, widths, 0.0):
            name = f"prefill_{call}" if call > 1 else "decode_step"
            total += seconds(manifest, name, done, limits) / shares["prefill" if call > 1 else "decode"]
            done += count
        return total

    count = ceil(prompt / width)
    steps = {1: seconds(manifest, "decode_step", at, limits) / shares["decode"]}
    for size in manifest.widths("batch"):
        steps[size] = seconds(manifest, f"decode_batch_{size}", at, limits) / shares["batch"]
    widest = max(manifest.prefill_widths, default=1)
    return Times(steps, read(widest), read(width) / count, count, gen)


def seconds(manifest: Manifest, function: str, position: int, limits: Limits) -> float:
    """Of a call whose kernels read and compute as fast as a machine can: of each kernel the longer of both."""
    work = manifest.compile.get("work", {}).get(function)
    if not work:
        raise PipelineError(f"this bundle does not say what its function {function} does; compile it again with kernels")
    return (
        sum(
            kernel["calls"]
            * max(amount(kernel, "bytes", position) / limits.read_gb_s, amount(kernel, "flops", position) / limits.gflop_s)
            for kernel in work.values()
        )
        / 1e9
    )


def state_bytes(manifest: Manifest, tokens: int) -> int:
    """Bytes that the states of one sequence of so many tokens take: pages exist as they are written."""
    total = 0.0
    for state in manifest.states:
        share = 1.0 if state.kind == "recurrent" else min(1.0, tokens / state.shape[1])
        total += state.elements * STATE_ITEM_BYTES[state.dtype] * share
    return round(total)
