"""IREE devices for the CPU cores of this machine. The threads of a device are called workers."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import iree.runtime as rt
from iree.runtime._binding import create_hal_driver

# Microseconds that a worker polls for work before it sleeps. On 2 cores with SmolLM2-135M, 10 has the
# best p90 latency of a token (5.2 ms; 0 and 50 have 5.6 to 7 ms), and 500 slows the caller by a fifth.
SPIN_US = 10
# Seconds to wait for workers to start; workers that start later are not pinned.
START_SECONDS = 1.0
# Bytes of a worker's stack; IREE's default, 128 KB, is too small for matrix units and for GEMVs of few bits.
STACK_BYTES = 1 << 20

_lock = threading.Lock()
_this_thread = threading.local()
# By number of CPU threads; a GPU by its id, such as "vulkan:0".
_devices: dict[int | str, rt.HalDevice] = {}


def lower_priority() -> None:
    """Lower the calling thread's priority below that of workers (Linux: SCHED_BATCH).

    Otherwise, when it wakes up while workers run, it takes a worker's core until the scheduler's
    next tick, for several milliseconds.
    """
    if not getattr(_this_thread, "is_lowered", False):
        _this_thread.is_lowered = True
        _change_policy("SCHED_OTHER", "SCHED_BATCH")


def _change_policy(old: str, new: str) -> bool:
    if not hasattr(os, old) or os.sched_getscheduler(0) != getattr(os, old):
        return False
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, getattr(os, new), os.sched_param(0))
        return True
    return False


def device(threads: int) -> rt.HalDevice:
    """Return this process's IREE device with `threads` threads; the first call creates it."""
    return shared_device(threads, lambda: _create(threads))


def shared_device(key: int | str, create: Callable[[], rt.HalDevice]) -> rt.HalDevice:
    """Return the device that this process stores under `key`; the first call creates it.

    key: number of threads of a CPU device, or the id of a GPU, such as "vulkan:0".
    """
    with _lock:
        if key not in _devices:
            changed = _change_policy("SCHED_BATCH", "SCHED_OTHER")
            try:
                _devices[key] = create()
            finally:
                if changed:
                    _change_policy("SCHED_OTHER", "SCHED_BATCH")
        return _devices[key]


@cache
def _vm_instance() -> rt.VmInstance:
    return rt.VmInstance()


# The runtime reports an instance that exists at exit as a leak.
atexit.register(_vm_instance.cache_clear)


def vm_instance() -> rt.VmInstance:
    """Return the only VmInstance of this process.

    Creating a second one writes to global variables of the runtime, so that a call of another
    thread may crash.
    """
    with _lock:
        return _vm_instance()


def release_devices() -> None:
    """Release all devices of this process; call this only if no device is in use."""
    with _lock:
        _devices.clear()


def _forked() -> None:
    """Forget devices in a forked child. Freeing one would wait for threads that do not exist."""
    global _lock
    _lock = threading.Lock()
    for inherited in _devices.values():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(inherited))
    _devices.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def _create(threads: int) -> rt.HalDevice:
    if threads == 1:
        # This device runs on the calling thread.
        return create_hal_driver("local-sync").create_default_device()
    # The driver reads process-wide flags. A list flag, such as the CPUs, would grow at every call.
    rt.flags.parse_flags(*_flags(threads, ()))
    before = _workers()
    made = create_hal_driver("local-task").create_default_device()
    # IREE lets workers run on all CPUs, even on those that `taskset` forbids.
    masks = [{cpu} for cpu in _pinned_cpus(threads)] or [set(_cpus())] * threads
    for worker, mask in zip(_started_workers(before, threads), masks if _cpus() else ()):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(worker, mask)
    return made


def _pinned_cpus(threads: int) -> list[int]:
    """Return a CPU per worker if there are as many; Linux sometimes runs two workers on one."""
    cpus = _cpus()
    return cpus if threads == len(cpus) else []


def _cpus() -> list[int]:
    # Empty if unknown.
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def _workers() -> set[int]:
    found = set()
    for task in Path("/proc/self/task").glob("*/comm"):
        # The thread may have ended.
        with contextlib.suppress(OSError):
            if task.read_text().startswith("iree-worker"):
                found.add(int(task.parent.name))
    return found


def _started_workers(before: set[int], threads: int) -> list[int]:
    """Wait up to `START_SECONDS` for `threads` new workers; return their thread ids."""
    until = time.monotonic() + START_SECONDS
    while len(new := sorted(_workers() - before)) < threads and time.monotonic() < until and _cpus():
        time.sleep(0.0005)
    return new


def task_flags(threads: int) -> tuple[str, ...]:
    """Return the flags that make IREE's command-line tools create the same device as `device`."""
    return _flags(threads, _pinned_cpus(threads))


def _flags(threads: int, cpus: Sequence[int]) -> tuple[str, ...]:
    topology = f"--task_topology_cpu_ids={','.join(map(str, cpus))}" if cpus else f"--task_topology_group_count={threads}"
    return topology, f"--task_worker_spin_us={SPIN_US}", f"--task_worker_stack_size={STACK_BYTES}"
