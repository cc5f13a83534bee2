"""The engine: the scheduler in a thread of its own, and sequences that come to it from an event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from castiron.pipelines.generation.engine import Engine, QueueFull, Stopping
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.generation.sequence import Delta, Failed, Finished
from tests.pipelines.test_scheduler import FakeBatch, Request, tell


async def ends(requests, count: int) -> None:
    while sum(not isinstance(event, Delta) for r in requests for event in r.events) < count:
        await asyncio.sleep(0.001)


class GatedBatch(FakeBatch):
    """Steps as often as it is let, and then without end once the gate is open."""

    def __init__(self, size: int):
        super().__init__(size)
        self.steps, self.open = threading.Semaphore(0), False

    def step(self, tokens: dict[int, int]) -> dict[int, int]:
        if not self.open:
            self.steps.acquire(timeout=10)
        return super().step(tokens)


def engine_test(test, batch: FakeBatch | None = None):
    async def run_it():
        engine = Engine(Scheduler(batch or FakeBatch(2)), queue=3)
        engine.start(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(30):
                await test(engine)
        finally:
            engine.stop()
        assert not any(thread.name == "model" for thread in threading.enumerate())

    asyncio.run(run_it())


def test_the_engine_takes_what_fits_in_its_queue_and_refuses_the_rest_whole():
    async def test(engine):
        long = [Request([3, i], 90, stop_tokens=[]) for i in range(4, 8)]
        engine.submit([r.sequence for r in long], tell)
        pair = [Request([5], 3), Request([6], 3)]
        with pytest.raises(QueueFull, match="2 wait"):
            engine.submit([r.sequence for r in pair], tell)
        assert engine.unfinished == 4
        engine.submit([pair[0].sequence], tell)
        await ends([*long, pair[0]], 5)
        assert engine.unfinished == 0 and not pair[1].events
        pair[0].check_as_alone()

    engine_test(test)


def test_what_is_cancelled_says_nothing_more_and_makes_room():
    batch = GatedBatch(2)

    async def test(engine):
        long = [Request([3, i], 90, stop_tokens=[]) for i in range(4, 9)]
        engine.submit([r.sequence for r in long], tell)
        batch.steps.release(5)
        while not long[0].events:
            await asyncio.sleep(0.001)
        # The loop is busy, so that what the model says meanwhile waits to be handed over.
        batch.steps.release(5)
        time.sleep(0.02)
        engine.cancel([r.sequence for r in long])
        batch.open = True
        batch.steps.release()
        told = [len(r.events) for r in long]
        after = Request([9, 9], 5)
        engine.submit([after.sequence], tell)
        await ends([after], 1)
        assert [len(r.events) for r in long] == told
        assert not any(isinstance(e, Finished) for r in long for e in r.events)
        after.check_as_alone()

    engine_test(test, batch)


def test_draining_finishes_what_runs_and_aborting_ends_it():
    async def test(engine):
        short, long = Request([3], 2), Request([4], 95, stop_tokens=[])
        engine.submit([short.sequence], tell)
        engine.drain()
        assert not engine.healthy
        with pytest.raises(Stopping, match="shutting down"):
            engine.submit([long.sequence], tell)
        await ends([short], 1)
        short.check_as_alone()
        engine._draining = False
        engine.submit([long.sequence], tell)
        engine.abort()
        assert isinstance(long.end, Failed) and isinstance(long.end.error, Stopping)

    engine_test(test)


def test_an_error_of_the_scheduler_itself_ends_requests_and_not_the_thread(capsys):
    async def test(engine):
        request, after = Request([3], 5), Request([4], 5)
        decode = engine.scheduler._decode
        engine.scheduler._decode = lambda events: 1 / 0
        engine.submit([request.sequence], tell)
        await ends([request], 1)
        assert isinstance(request.end, Failed)
        engine.scheduler._decode = decode
        engine.submit([after.sequence], tell)
        await ends([after], 1)
        after.check_as_alone()

    engine_test(test)
    assert "ZeroDivisionError" in capsys.readouterr().err
