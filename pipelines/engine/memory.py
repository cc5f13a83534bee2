"""Sizes of the memory that a bundle needs, that the machine has, and that this process uses."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from castiron.emitter.abi import State
from castiron.pipelines.terminal import megabytes, print_message
from castiron.vmfb.bundle.manifest import WEIGHTS, Manifest

# Files with the memory limit of this process's control group, version 2 and 1.
LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class Needed:
    """Bytes of a bundle: the mapped weights, and the states of each slot at full context."""

    weights: int
    state: int
    slots: int = 1

    @property
    def total(self) -> int:
        return self.weights + self.state * self.slots

    def __str__(self) -> str:
        states = f"{self.slots} x {megabytes(self.state)}" if self.slots > 1 else megabytes(self.state)
        return f"weights {megabytes(self.weights)}, states {states} when full"


def needed(manifest: Manifest, slots: int = 1) -> Needed:
    """Return the memory that a bundle needs for `slots` sequences that fill the context."""
    state = state_bytes(manifest.states, manifest.context, manifest.max_context)
    return Needed(manifest.files[WEIGHTS].size, state, slots)


def state_bytes(states: Iterable[State], context: int, max_context: int) -> int:
    """Return the bytes of a sequence of `context` tokens; `states` have max_context positions."""
    used = {"positional": context / max_context}
    return sum(int(state.nbytes * used.get(state.kind, 1)) for state in states)


def slots_of(manifest: Manifest) -> int:
    """Return how many sequences can run at the same time: the bundle's largest batch size, or 1."""
    return max(manifest.widths("batch"), default=1)


def mapped_weights(*manifests: Manifest) -> int:
    """Return the total bytes of these bundles' weights in main memory; GPU bundles do not count."""
    return sum(manifest.files[WEIGHTS].size for manifest in manifests if not manifest.target.driver)


def warn_of_shortage(weights: int) -> None:
    """Print a warning if weights of `weights` bytes do not fit in the machine's memory."""
    available = total_bytes()
    if weights > available:
        print_message(
            f"the weights take {megabytes(weights)}, but the machine has {megabytes(available)} of memory: every token will "
            "read them from disk; use a smaller model, or one with fewer bits"
        )


def print_memory(manifest: Manifest, slots: int, draft: Manifest | None = None) -> None:
    """Print the memory that a bundle and its draft model need; warn if the machine has less."""
    need, of_draft = needed(manifest, slots), needed(draft) if draft else None
    total = need.total + (of_draft.total if of_draft else 0)
    drafts = f"; draft: {of_draft}" if of_draft else ""
    available = "" if manifest.target.driver else f", of {megabytes(total_bytes())}"
    print_message(f"memory: {need}{drafts}; up to {megabytes(total)} in all{available}")
    warn_of_shortage(mapped_weights(manifest, *([draft] if draft else [])))


def total_bytes() -> int:
    """Return the machine's memory in bytes, or the limit of this container if it is lower."""
    # Python cannot read the memory of Windows; use 2^62 bytes there, so that no model is too large.
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 1 << 62]
    for path in LIMITS:
        # The file may be absent, or contain "max".
        with suppress(OSError, ValueError):
            found.append(int(path.read_text()))
    return min(found)


def peak_rss_mb() -> float:
    """Return the peak resident memory of this process in MB (10^6 bytes), mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage includes the time before exec, when a child is still a copy of its parent.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    try:
        import resource
    except ImportError:
        # Windows does not report the peak.
        return 0.0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
