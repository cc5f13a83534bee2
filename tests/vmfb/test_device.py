"""The scheduling of a device's workers: their priority over the caller, and their CPUs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest

from castiron.vmfb.device.cpu_device import _create, device, lower_priority

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


T = TypeVar("T")


def in_a_thread(work):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def of_workers(query: Callable[[int], T]) -> dict[int, T]:
    """Return the result of `query` for each worker thread, by thread id."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        # Other threads of the tests may end meanwhile.
        with contextlib.suppress(OSError):
            if "iree-worker" in (task / "comm").read_text():
                found[int(task.name)] = query(int(task.name))
    return found


def test_only_the_caller_gets_a_lower_priority():
    def work():
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        lower_priority()
        before = of_workers(os.sched_getscheduler)
        # No other test uses a device with 3 threads, so that it is created here.
        device(3)
        policies = {policy for thread, policy in of_workers(os.sched_getscheduler).items() if thread not in before}
        return os.sched_getscheduler(0), policies

    assert in_a_thread(work) == (os.SCHED_BATCH, {os.SCHED_OTHER})


# Devices are not freed before the process ends.
MADE = []


def test_only_workers_for_all_cpus_are_pinned():
    """Pinned workers of several processes might share a CPU while other CPUs are idle."""
    cpus = os.sched_getaffinity(0)
    one_on_each = [{cpu} for cpu in sorted(cpus)] if len(cpus) > 1 else []
    # The same number of threads twice, as for a process and its fork.
    for threads, masks in ((len(cpus), one_on_each), (len(cpus) + 1, [cpus] * (len(cpus) + 1)), (len(cpus), one_on_each)):
        before, until = of_workers(os.sched_getaffinity), time.monotonic() + 60
        MADE.append(_create(threads))
        found: list[set[int]] = []
        while len(found) < len(masks) and time.monotonic() < until:
            found = [mask for thread, mask in of_workers(os.sched_getaffinity).items() if thread not in before]
        assert sorted(found, key=min) == masks


def test_workers_obey_the_cpu_affinity():
    """IREE itself ignores the affinity that `taskset` sets."""

    def work():
        cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})
        before = of_workers(os.sched_getaffinity)
        MADE.append(_create(2))
        return cpu, [mask for thread, mask in of_workers(os.sched_getaffinity).items() if thread not in before]

    cpu, masks = in_a_thread(work)
    assert masks == [{cpu}] * 2


def test_a_chosen_scheduling_policy_stays():
    def work():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        lower_priority()
        return os.sched_getscheduler(0)

    assert in_a_thread(work) == os.SCHED_IDLE
