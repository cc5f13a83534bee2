"""IREE devices on the cores of this machine."""

from __future__ import annotations

import threading

import iree.runtime as rt
from iree.runtime._binding import create_hal_driver

from vmfb.cpu import physical_cores

# How long a worker looks for work before it sleeps. Within a call workers hardly wait; between two tokens a few
# microseconds are bridged. Measured on 2 cores, SmolLM2-135M: 10 gives the steadiest tokens (p90 5.2 ms, with 0 or 50
# 5.6 to 7 at the same median), 500 takes a fifth from the thread that asks.
SPIN_US = 10

_lock = threading.Lock()
_devices: dict[int, rt.HalDevice] = {}


def default_threads() -> int:
    """One per physical core: hyperthreads share the vector units that a kernel keeps full."""
    return physical_cores()


def device(threads: int) -> rt.HalDevice:
    """The device that runs on `threads` >= 1 threads; made once a process."""
    with _lock:
        if threads not in _devices:
            _devices[threads] = _create(threads)
        return _devices[threads]


def _create(threads: int) -> rt.HalDevice:
    if threads == 1:
        # The caller's own thread: no hand-over to a worker at all.
        return create_hal_driver("local-sync").create_default_device()
    # The driver reads the process-wide flags while it is made; every flag that matters is set each time. The workers
    # are not pinned: pinned ones are no faster on a quiet machine and cannot give way to another process's thread.
    rt.flags.parse_flags(f"--task_topology_group_count={threads}", f"--task_worker_spin_us={SPIN_US}")
    return create_hal_driver("local-task").create_default_device()
