"""The asynchronous engine: the scheduler in its own thread, and requests from an event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from castiron.pipelines.api.api_errors import QueueFull, Stopping
from castiron.pipelines.api.async_engine import AsyncEngine
from castiron.pipelines.engine.engine import Engine, EventStream
from castiron.pipelines.engine.request import Failed, Finished, Request, Tokens
from tests.engine.test_scheduler import Asked, FakeBatch, report


async def read(stream) -> None:
    async for request, event in stream:
        report(request, event)


def submit(engine, *asked: Asked) -> asyncio.Task:
    """Submit requests; return the task that reads their events."""
    return asyncio.create_task(read(engine.submit([each.request for each in asked])))


class GatedBatch(FakeBatch):
    """A batch that makes one step for each release of `steps`, and any number once it is `open`."""

    def __init__(self, size: int):
        super().__init__(size)
        self.steps, self.open = threading.Semaphore(0), False

    def step(self, tokens: dict[int, int]) -> dict[int, int]:
        if not self.open:
            self.steps.acquire(timeout=10)
        return super().step(tokens)


def engine_test(test, batch: FakeBatch | None = None):
    async def run_it():
        engine = AsyncEngine(Engine(batch or FakeBatch(2)), queue=3)
        engine.start(asyncio.get_running_loop())
        try:
            async with asyncio.timeout(30):
                await test(engine)
        finally:
            engine.stop()
        assert not any(thread.name == "model" for thread in threading.enumerate())

    asyncio.run(run_it())


def test_rejects_requests_beyond_the_queue():
    async def test(engine):
        long = [Asked([3, i], 90, stop_tokens=[]) for i in range(4, 8)]
        reading = submit(engine, *long)
        pair = [Asked([5], 3), Asked([6], 3)]
        with pytest.raises(QueueFull, match="2 wait"):
            submit(engine, *pair)
        assert engine.unfinished == 4
        await asyncio.gather(reading, submit(engine, pair[0]))
        assert engine.unfinished == 0 and not pair[1].events
        pair[0].check_as_single()

    engine_test(test)


def test_a_cancelled_request_has_no_more_events_and_frees_its_slot():
    batch = GatedBatch(2)

    async def test(engine):
        long = [Asked([3, i], 90, stop_tokens=[]) for i in range(4, 9)]
        stream = engine.submit([each.request for each in long])
        reading = asyncio.create_task(read(stream))
        batch.steps.release(5)
        while not long[0].events:
            await asyncio.sleep(0.001)
        # The loop is blocked, so events of these steps wait for their reader.
        batch.steps.release(5)
        time.sleep(0.02)
        stream.close()
        batch.open = True
        batch.steps.release()
        reported = [len(r.events) for r in long]
        after = Asked([9, 9], 5)
        await submit(engine, after)
        reading.cancel()
        assert engine.unfinished == 0 and [len(r.events) for r in long] == reported
        assert not any(isinstance(e, Finished) for r in long for e in r.events)
        after.check_as_single()

    engine_test(test, batch)


def test_draining_finishes_requests_and_aborting_ends_them():
    async def test(engine):
        short, long = Asked([3], 2), Asked([4], 95, stop_tokens=[])
        reading = submit(engine, short)
        engine.drain()
        assert not engine.healthy
        with pytest.raises(Stopping, match="shutting down"):
            submit(engine, long)
        await reading
        short.check_as_single()
        engine._is_draining = False
        reading = submit(engine, long)
        engine.abort()
        await reading
        assert isinstance(long.end, Failed) and isinstance(long.end.error, Stopping)

    engine_test(test)


def test_an_error_of_the_scheduler_itself_ends_requests_and_not_the_thread(capsys):
    async def test(engine):
        request, after = Asked([3], 5), Asked([4], 5)
        decode = engine.engine.scheduler._decode
        engine.engine.scheduler._decode = lambda events: 1 / 0
        await submit(engine, request)
        assert isinstance(request.end, Failed)
        engine.engine.scheduler._decode = decode
        await submit(engine, after)
        after.check_as_single()

    engine_test(test)
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_event_that_arrives_while_the_last_one_is_handled_is_not_lost():
    request = Request([1], 8)
    stream = EventStream(None, [request])

    async def read() -> list:
        found, arriving = [], [Tokens(), Finished("stop")]
        stream.add(request, arriving.pop(0))
        async for _, event in stream:
            found.append(event)
            if arriving:
                stream.add(request, arriving.pop(0))
                stream.arrived.set()
        return found

    found = asyncio.run(asyncio.wait_for(read(), 10))
    assert [type(event) for event in found] == [Tokens, Finished]
