"""Whether tiles leave a bundle's tokens as they were: greedy, through every function that it has."""

from __future__ import annotations

from collections.abc import Callable, Collection

from castiron.pipelines.checking.verify import encoded_prompts
from castiron.pipelines.errors import PipelineError
from castiron.vmfb.batch import Batch
from castiron.vmfb.bundle import Bundle
from castiron.vmfb.session import Session

PROMPTS, TOKENS, BATCHED = 12, 32, 8


def check_room(context: int, verify: Collection[int], shortest: int = 1) -> int:
    """How many tokens a prompt may have where passes over so many tokens are compared; PipelineError for less than it has."""
    room = context - TOKENS - max(verify, default=0)
    if room < shortest:
        raise PipelineError(f"a context of {context} leaves no room to compare answers; tune with a larger one")
    return room


def prompts_of(bundle: Bundle) -> list[list[int]]:
    """The first of verify's that leave room for an answer; PipelineError if none does."""
    manifest, prompts = bundle.manifest, [tokens for _, tokens in encoded_prompts(bundle)]
    room = check_room(manifest.context, manifest.widths("verify"), min(map(len, prompts)))
    return [tokens for tokens in prompts if len(tokens) <= room][:PROMPTS]


def answers(bundle: Bundle, threads: int, prompts: list[list[int]]) -> list[list[int]]:
    """What the bundle gives for the prompts: greedy tokens one by one, those of verify's passes, those of batches."""
    session, found = Session(bundle, threads), []
    for prompt in prompts:
        session.rewind(0)
        tokens = [session.prefill(prompt)]
        session.keep()
        while len(tokens) < TOKENS:
            tokens.append(session.step(tokens[-1]))
        found.append(tokens)
        for width in bundle.manifest.widths("verify"):
            session.rewind(len(prompt))
            found.append(session.verify((2 * tokens)[:width]))
    for size in bundle.manifest.widths("batch"):
        batch = Batch(bundle, threads)
        last = {slot: batch.slots[slot].prefill(prompts[slot % len(prompts)]) for slot in range(size)}
        for _ in range(BATCHED):
            last = batch.step(last)
            found.append([last[slot] for slot in range(size)])
    return found


def exact_part(tiles: dict, same: Callable[[dict], bool]) -> dict:
    """Those of the products' tiles that leave the tokens as they are: all, or those that do so each alone and together."""
    if not tiles or same(tiles):
        return tiles
    if len(tiles) == 1:
        return {}
    alone = {name: found for name, found in tiles.items() if same({name: found})}
    return alone if len(alone) < len(tiles) and alone and same(alone) else {}
