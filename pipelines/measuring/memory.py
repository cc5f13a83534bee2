"""How much memory this process has used, how much a bundle will, and how much there is."""

from __future__ import annotations

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from castiron.pipelines.progress import say
from castiron.pipelines.sizes import megabytes
from castiron.vmfb.manifest import STATE_ITEM_BYTES, WEIGHTS, Manifest

# Where control groups, version 2 and 1, say what this process may use at most.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Needed:
    """Bytes: `weights` are the mapped file, once however many read it; `state` those of one sequence when its context is
    full, of which pages exist as they are written; `slots` sequences at once."""

    weights: int
    state: int
    slots: int = 1

    def __str__(self) -> str:
        states = f"{self.slots} x {megabytes(self.state)}" if self.slots > 1 else megabytes(self.state)
        return f"weights {megabytes(self.weights)}, states {states} when full"


def needed(manifest: Manifest, slots: int = 1) -> Needed:
    """What a bundle needs for so many sequences at once."""
    state = sum(state.elements * STATE_ITEM_BYTES[state.dtype] for state in manifest.states)
    return Needed(manifest.files[WEIGHTS].size, state, slots)


def slots_of(manifest: Manifest) -> int:
    """Sequences that `castiron serve` runs at once: those of the widest batch function."""
    return max(manifest.widths("batch"), default=1)


def warn_of_shortage(*manifests: Manifest) -> None:
    """Says on stderr of bundles that are used together that their weights are more than the memory of this machine or
    container, if they are."""
    weights, there = sum(manifest.files[WEIGHTS].size for manifest in manifests), total_bytes()
    if weights > there:
        say(
            f"the weights take {megabytes(weights)} and there are {megabytes(there)} of memory: every token will read them "
            "from disk; take a smaller model, or one with fewer bits"
        )


def say_memory(manifest: Manifest, slots: int, draft: Manifest | None = None) -> None:
    """Says on stderr, before it is taken, what so many sequences at once will need, and whether that is there."""
    need, there = needed(manifest, slots), total_bytes()
    most, drafts = need.weights + need.state * slots, ""
    if draft:
        more = needed(draft)
        most, drafts = most + more.weights + more.state, f"; draft: {more}"
    say(f"memory: {need}{drafts}; {megabytes(most)} at most, of {megabytes(there)}")
    warn_of_shortage(manifest, *[draft] * bool(draft))


def total_bytes() -> int:
    """The machine's memory, or the part of it that this process's container may use."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for place in LIMITS:
        try:
            found.append(int(place.read_text()))
        # Absent, or "max".
        except (OSError, ValueError):
            continue
    return min(found)


def peak_rss_mb() -> float:
    """The most memory that this process has had resident, in 10^6 bytes, mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage counts from before exec, when a child still is a copy of its parent.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
