"""Who goes first: a device's workers, not the thread that waits for them."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from castiron.vmfb.device import _create, device, give_way

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def policies_of_workers() -> set[int]:
    tasks = Path("/proc/self/task").iterdir()
    return {os.sched_getscheduler(int(t.name)) for t in tasks if "iree-worker" in (t / "comm").read_text()}


def test_a_caller_gives_way_and_workers_made_later_do_not():
    def work():
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        give_way()
        # A number of threads that nothing else asks for, so that the device is made here.
        device(3)
        return os.sched_getscheduler(0), policies_of_workers()

    assert in_a_thread(work) == (os.SCHED_BATCH, {os.SCHED_OTHER})


def masks_of_workers() -> dict[str, set[int]]:
    """By thread the CPUs that it may run on."""
    tasks = Path("/proc/self/task").iterdir()
    return {t.name: os.sched_getaffinity(int(t.name)) for t in tasks if "iree-worker" in (t / "comm").read_text()}


# A device lives as long as its process.
MADE = []


def test_workers_for_all_cpus_stand_one_on_each_and_others_go_where_they_like():
    """Those of several processes with a part of the CPUs each would otherwise meet on the same ones."""
    cpus = os.sched_getaffinity(0)
    one_on_each = [{cpu} for cpu in sorted(cpus)] if len(cpus) > 1 else []
    # In any order, and as often as a process and its forks make devices.
    for threads, masks in ((len(cpus), one_on_each), (len(cpus) + 1, [cpus] * (len(cpus) + 1)), (len(cpus), one_on_each)):
        before, until = masks_of_workers(), time.monotonic() + 10
        MADE.append(_create(threads))
        found: list[set[int]] = []
        while len(found) < len(masks) and time.monotonic() < until:
            found = [mask for thread, mask in masks_of_workers().items() if thread not in before]
        assert sorted(found, key=min) == masks


def test_a_policy_that_somebody_chose_stays():
    def work():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        give_way()
        return os.sched_getscheduler(0)

    assert in_a_thread(work) == os.SCHED_IDLE
