"""Who goes first: a device's workers, not the thread that waits for them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from castiron.vmfb.device import _create, device, give_way

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has SCHED_BATCH")


T = TypeVar("T")


def in_a_thread(work):
    found = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


def of_workers(ask: Callable[[int], T]) -> dict[int, T]:
    """By thread of a device what is asked of it; other threads of the tests may end meanwhile."""
    found = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            if "iree-worker" in (task / "comm").read_text():
                found[int(task.name)] = ask(int(task.name))
    return found


def test_a_caller_gives_way_and_workers_made_later_do_not():
    def work():
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        give_way()
        before = of_workers(os.sched_getscheduler)
        # A number of threads that nothing else asks for, so that the device is made here.
        device(3)
        policies = {policy for thread, policy in of_workers(os.sched_getscheduler).items() if thread not in before}
        return os.sched_getscheduler(0), policies

    assert in_a_thread(work) == (os.SCHED_BATCH, {os.SCHED_OTHER})


# A device lives as long as its process.
MADE = []


def test_workers_for_all_cpus_stand_one_on_each_and_others_go_where_they_like():
    """Those of several processes with a part of the CPUs each would otherwise meet on the same ones."""
    cpus = os.sched_getaffinity(0)
    one_on_each = [{cpu} for cpu in sorted(cpus)] if len(cpus) > 1 else []
    # In any order, and as often as a process and its forks make devices.
    for threads, masks in ((len(cpus), one_on_each), (len(cpus) + 1, [cpus] * (len(cpus) + 1)), (len(cpus), one_on_each)):
        before, until = of_workers(os.sched_getaffinity), time.monotonic() + 60
        MADE.append(_create(threads))
        found: list[set[int]] = []
        while len(found) < len(masks) and time.monotonic() < until:
            found = [mask for thread, mask in of_workers(os.sched_getaffinity).items() if thread not in before]
        assert sorted(found, key=min) == masks


def test_workers_stay_on_the_cpus_that_their_maker_may_use():
    """As those of `taskset`, which IREE lets its workers leave."""

    def work():
        cpu = min(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cpu})
        before = of_workers(os.sched_getaffinity)
        MADE.append(_create(2))
        return cpu, [mask for thread, mask in of_workers(os.sched_getaffinity).items() if thread not in before]

    cpu, masks = in_a_thread(work)
    assert masks == [{cpu}] * 2


def test_a_policy_that_somebody_chose_stays():
    def work():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        give_way()
        return os.sched_getscheduler(0)

    assert in_a_thread(work) == os.SCHED_IDLE
