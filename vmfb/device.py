"""IREE devices on the cores of this machine."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import iree.runtime as rt
from iree.runtime._binding import create_hal_driver

# How long a worker looks for work before it sleeps. Within a call workers hardly wait; between two tokens a few
# microseconds are bridged. Measured on 2 cores, SmolLM2-135M: 10 gives the steadiest tokens (p90 5.2 ms, with 0 or 50
# 5.6 to 7 at the same median), 500 takes a fifth from the thread that asks.
SPIN_US = 10
# Seconds that workers have at most to begin to run, before some of them stand anywhere.
NAMED = 1.0

_lock = threading.Lock()
_this_thread = threading.local()
_devices: dict[int, rt.HalDevice] = {}


def give_way() -> None:
    """Makes the calling thread one that lets a device's workers go first (Linux: SCHED_BATCH), once a thread.

    A caller that wakes up while workers run would otherwise take a core from one of them until the next tick of the
    scheduler, several milliseconds later. Threads that it starts later inherit it, workers of a device do not.
    """
    if not getattr(_this_thread, "gives_way", False):
        _this_thread.gives_way = True
        _change_policy("SCHED_OTHER", "SCHED_BATCH")


def _change_policy(old: str, new: str) -> bool:
    """Changes the calling thread's scheduling policy if it is `old`; False where it is not or there are none."""
    if not hasattr(os, old) or os.sched_getscheduler(0) != getattr(os, old):
        return False
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, getattr(os, new), os.sched_param(0))
        return True
    return False


def device(threads: int) -> rt.HalDevice:
    """The device that runs on `threads` >= 1 threads; made once a process."""
    with _lock:
        if threads not in _devices:
            changed = _change_policy("SCHED_BATCH", "SCHED_OTHER")
            try:
                _devices[threads] = _create(threads)
            finally:
                if changed:
                    _change_policy("SCHED_OTHER", "SCHED_BATCH")
        return _devices[threads]


def _forked() -> None:
    """In a forked child, which has none of its parent's workers: devices are made anew. Those of the parent are never let
    go of, since that would wait for their workers."""
    global _lock
    _lock = threading.Lock()
    for inherited in _devices.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    _devices.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _create(threads: int) -> rt.HalDevice:
    if threads == 1:
        # The caller's own thread: no hand-over to a worker at all.
        return create_hal_driver("local-sync").create_default_device()
    # The driver reads the process-wide flags while it is made. One that is a list, as that of places, would grow each time.
    rt.flags.parse_flags(*_flags(threads, ()))
    before = _workers()
    made = create_hal_driver("local-task").create_default_device()
    # IREE lets workers run on all CPUs there are, also those that `taskset` keeps from this process.
    masks = [{cpu} for cpu in _places(threads)] or [set(_cpus())] * threads
    for worker, mask in zip(_begun(before, threads), masks if _cpus() else ()):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(worker, mask)
    return made


def _places(threads: int) -> list[int]:
    """The CPU of each of so many workers; none where they are left to the system.

    Workers for all CPUs that this process may use stand one on each: the kernel's scheduler now and then stacks two on
    one and leaves another idle for whole tokens. Fewer workers are left to it, since others may need the CPUs more.
    """
    cpus = _cpus()
    return cpus if threads == len(cpus) else []


def _cpus() -> list[int]:
    """Those that this process may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _workers() -> set[int]:
    """The threads of all devices (Linux)."""
    found = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        # It may have ended.
        with contextlib.suppress(OSError):
            if task.read_text().startswith("iree-worker"):
                found.add(int(task.parent.name))
    return found


def _begun(before: set[int], threads: int) -> list[int]:
    """The workers of a device, which were not there `before`. They take their names when they begin to run."""
    until = time.monotonic() + NAMED
    while len(new := sorted(_workers() - before)) < threads and time.monotonic() < until and _cpus():
        time.sleep(0.0005)
    return new


def task_flags(threads: int) -> tuple[str, ...]:
    """The flags with which the runtime's own tools make the device of `device(threads)`, for more than one."""
    return _flags(threads, _places(threads))


def _flags(threads: int, places: Sequence[int]) -> tuple[str, ...]:
    topology = f"--task_topology_cpu_ids={','.join(map(str, places))}" if places else f"--task_topology_group_count={threads}"
    return topology, f"--task_worker_spin_us={SPIN_US}"
