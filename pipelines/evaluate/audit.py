"""Compute an answer again from its receipt, several tokens in a call, and compare each token."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from castiron.pipelines.engine.receipt import Receipt, Transcript, sampling_of
from castiron.pipelines.engine.request import Chooser, Request
from castiron.pipelines.engine.sampling import NEAR, NEAR_DRAWN, logit_rows
from castiron.pipelines.errors import PipelineError
from castiron.pipelines.text.generate import check_token_ids
from castiron.pipelines.text.text_output import text_request
from castiron.pipelines.text.tokenizer import load_tokenizer
from castiron.vmfb.bundle.bundle import Bundle
from castiron.vmfb.run.session import Session


@dataclass(frozen=True)
class Difference:
    """A difference between a receipt and the answer that a bundle gives now.

    what: "logits", "token", "end" or the name of a field of the receipt. position: index of the
    token in the answer; None for a field. margin: logit of the computed minus of the recorded one.
    """

    what: str
    recorded: str | int | None
    computed: str | int | None
    position: int | None = None
    margin: float | None = None


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    compared: "bits" of all logits, or only "tokens". positions: tokens before the first difference.
    rounded: tokens that differ only because the bundle rounds otherwise in calls of several tokens.
    """

    compared: str
    positions: int
    differences: tuple[Difference, ...] = ()
    rounded: tuple[Difference, ...] = ()


def audit(
    receipt: Receipt, bundle: Bundle, threads: int | None = None, *, other_bundle: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Audit:  # fmt: skip
    """Compute the answer of a receipt again with a bundle.

    other_bundle: whether it may be another bundle of the same checkpoint. progress: called with
    (tokens read, total). Raises PipelineError for ids or a context that the bundle does not
    support.
    """
    manifest = bundle.manifest
    compared = "bits" if manifest.has_same_bits else "tokens"
    expected = {"sha256": receipt.digest, "checkpoint": manifest.source.get("sha256"), "numerics": manifest.numerics}
    if not other_bundle:
        expected["bundle"] = manifest.sha256
    fields = [Difference(name, getattr(receipt, name), value) for name, value in expected.items()]
    if differing := tuple(field for field in fields if field.recorded != field.computed):
        return Audit(compared, 0, differing)
    request = _request(receipt, bundle)
    session = Session(bundle.with_context(manifest.max_context), threads)
    recorded, rounded, transcript = list(receipt.answer), list[Difference](), Transcript()
    before, total = len(receipt.prompt) - 1, len(receipt.prompt) + len(recorded) - 1
    if before:
        session.prefill(receipt.prompt[:-1], progress and (lambda done, _: progress(done, total)))
    width = max(manifest.widths("verify"), default=1)
    for position, row in enumerate(logit_rows(session, [receipt.prompt[-1], *recorded[:-1]], width)):
        if progress:
            progress(before + position, total)
        token, found = recorded[position], list[Difference]()
        if request.finish_reason:
            ended = Difference("end", "the answer goes on", request.finish_reason, position)
            return Audit(compared, position, (ended,), tuple(rounded))
        computed = request.chooser.pick(int(row.argmax()), lambda: row)
        if manifest.has_same_bits:
            transcript.add(token, row)
            if transcript.hashes[-1] != receipt.logits[position]:
                found.append(Difference("logits", receipt.logits[position], transcript.hashes[-1], position))
        if computed != token:
            difference = Difference("token", token, computed, position, float(row[computed] - row[token]))
            is_rounded = not found and token in _near_tokens(request.chooser, row, token, manifest.has_same_bits)
            (rounded if is_rounded else found).append(difference)
        if found:
            return Audit(compared, position, tuple(found), tuple(rounded))
        request.advance(token, lambda: row, token)
    ends = (Difference("end", receipt.finish_reason, request.finish_reason or "the answer goes on", len(recorded)),)
    return Audit(compared, len(recorded), () if receipt.finish_reason == request.finish_reason else ends, tuple(rounded))


def _request(receipt: Receipt, bundle: Bundle) -> Request:
    manifest = bundle.manifest
    if not len(receipt.prompt) + len(receipt.answer) - 1 <= receipt.context <= manifest.max_context:
        raise PipelineError(
            f"invalid receipt: it has {len(receipt.prompt)} + {len(receipt.answer)} tokens in a context of {receipt.context}; "
            f"{bundle.path} supports {manifest.max_context}"
        )
    sampling = sampling_of(receipt.sampling)
    check_token_ids([*receipt.prompt, *receipt.answer, *receipt.stop_tokens, *sampling.logit_bias], manifest.vocab, "receipt: ")
    return text_request(
        receipt.prompt, receipt.context, load_tokenizer(bundle) if receipt.stop_strings else None,
        sampling=sampling, max_tokens=receipt.max_tokens, stop_tokens=receipt.stop_tokens,
        stop_strings=receipt.stop_strings, repetition_stop=receipt.repetition_stop,
    )  # fmt: skip


def _near_tokens(chooser: Chooser, logits: np.ndarray, token: int, has_same_bits: bool) -> set[int]:
    rows = [logits]
    if not has_same_bits:
        raised = logits.copy()
        raised[token] += NEAR * np.abs(logits[np.isfinite(logits)]).max(initial=0.0)
        rows.append(raised)
    found = set()
    for row in rows:
        for shift in (-NEAR_DRAWN, 0.0, NEAR_DRAWN):
            other = chooser.lookahead()
            other.sampler.number = min(max(other.sampler.number + shift, 0.0), 1 - sys.float_info.epsilon)
            found.add(other.pick(int(row.argmax()), lambda row=row: row))
    return found
