"""How much memory this process has used."""

import resource
import sys
from pathlib import Path


def peak_rss_mb() -> float:
    """The most memory that this process has had resident, in 10^6 bytes, mapped files included."""
    status = Path("/proc/self/status")
    if status.exists():
        # getrusage counts from before exec, when a child still is a copy of its parent.
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
