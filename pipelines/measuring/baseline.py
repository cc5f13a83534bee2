"""What became slower or faster than a former run of bench said, figure by figure, in the JSON that it saved."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from castiron.pipelines.errors import PipelineError

# Key of a figure, what it is, and whether more of it is better.
MODEL_FIGURES = (
    ("decode_tok_s", "decode tok/s", True),
    ("prefill_tok_s", "prefill tok/s", True),
    ("ttft_ms", "first token ms", False),
    ("rss_mb", "memory MB", False),
)
KERNEL_FIGURES = (("us", "us", False),)
# What is neither slower nor faster: runs on a quiet machine are so far apart.
SAME = 0.02
# How far the machine's own limits may be apart before that is said.
LIMITS_APART = 0.05


def read_baseline(file: str) -> dict[str, Any]:
    """The object that bench wrote to `file`; PipelineError if it is none."""
    try:
        found = json.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise PipelineError(f"--baseline {file} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or not all(isinstance(found.get(key), dict) for key in ("machine", "settings")):
        raise PipelineError(f"--baseline {file} is not what castiron bench --save writes")
    return found


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """figures: [{of, figure, before, now, ratio, verdict}], where a ratio above 1 is better now; notes: what else differs.

    verdict: faster, slower or same; less and more for memory. It is same where the ratio is within SAME of 1, or where
    both ran several times and each median lies among the other's runs.
    """
    figures = []
    for of, key, words, more in _figures(now):
        values = tuple(_part(result, of).get(key) for result in (before, now))
        if not all(isinstance(value, int | float) and value > 0 for value in values):
            continue
        old, new = values
        ratio = new / old if more else old / new
        runs = tuple(_part(result, of).get("runs", {}).get(key, {}) for result in (before, now))
        words_of = ("less", "more") if key == "rss_mb" else ("faster", "slower")
        same = abs(ratio - 1) <= SAME or _overlap(*runs)
        verdict = "same" if same else words_of[ratio < 1]
        figures.append({"of": of, "figure": words, "before": old, "now": new, "ratio": round(ratio, 3), "verdict": verdict})
    return {"figures": figures, "notes": list(_notes(before, now))}


def _figures(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str, bool]]:
    """(of whom, key, words, whether more is better) of every figure that the result may have."""
    if "kernel" in result:
        yield from ((result["settings"]["kernel"], *figure) for figure in KERNEL_FIGURES)
        return
    for of in ("castiron", *result.get("peers", {})):
        yield from ((of, *figure) for figure in MODEL_FIGURES)


def _part(result: Mapping[str, Any], of: str) -> Mapping[str, Any]:
    """Where the figures of an engine or a kernel stand; nothing if it is not in the result."""
    if "kernel" in result:
        return result
    found = result.get(of) or result.get("peers", {}).get(of)
    return found if isinstance(found, dict) else {}


def _overlap(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether each median lies within the other's runs, of which there are several."""
    try:
        if min(len(before["values"]), len(now["values"])) < 2:
            return False
        return before["min"] <= now["median"] <= before["max"] and now["min"] <= before["median"] <= now["max"]
    except (KeyError, TypeError):
        return False


def _notes(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    for part, words in (("settings", "settings"), ("machine", "machine")):
        old, new = before[part], now[part]
        for key in dict.fromkeys([*new, *old]):
            if key == "runs" or old.get(key) == new.get(key):
                continue
            if key in ("read_gb_s", "peak_gflop_s") and old.get(key) and new.get(key):
                if abs(new[key] / old[key] - 1) > LIMITS_APART:
                    yield f"the machine's {key} was {old[key]:g} and is {new[key]:g}"
                continue
            yield f"other {words}: {key} was {old.get(key)} and is {new.get(key)}"


def table(comparison: Mapping[str, Any], file: str) -> str:
    """The comparison for a person."""
    lines = [f"against {file}:"]
    for row in comparison["figures"]:
        lines.append(
            f"  {row['of']:<17} {row['figure']:<14} {row['before']:>9.6g} -> {row['now']:<9.6g} {row['ratio']:>6.2f}x  "
            f"{row['verdict']}"
        )
    if not comparison["figures"]:
        lines.append("  it has no figure that was measured now")
    return "\n".join([*lines, *(f"  note: {note}" for note in comparison["notes"])])
