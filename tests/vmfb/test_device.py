"""Who goes first: a device's workers, not the thread that waits for them."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from castiron.vmfb.device import device, give_way

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


def test_a_policy_that_somebody_chose_stays():
    def work():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        give_way()
        return os.sched_getscheduler(0)

    assert in_a_thread(work) == os.SCHED_IDLE
