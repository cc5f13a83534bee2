"""Who decodes in which slots, over the model in NumPy of test_scheduler: no more rows are computed than there need be."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from castiron.pipelines.generation.placing import MOVED
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.vmfb.batch import fitting, window
from tests.pipelines.test_scheduler import FakeBatch, Request, alone_past_eos, run


@settings(max_examples=12)
@given(st.permutations(range(8)), st.integers(2, 7))
def test_those_that_stay_share_the_smallest_function(order, stay):
    """Whoever leaves: from then on as many rows are computed as the smallest function has that has room for them, soon."""
    batch = FakeBatch(8, 2, 4)
    scheduler = Scheduler(batch)
    requests = [Request([3 + i, 4], 60, stop_tokens=[]) for i in range(8)]
    for request in requests:
        scheduler.submit(request.sequence)
    run(scheduler, 9)
    for leaves in order[stay:]:
        scheduler.cancel(requests[leaves].sequence)
    run(scheduler, 3)
    batch.work.clear()
    run(scheduler, 20)
    assert {window(batch.sizes, work[1:])[0] for work in batch.work} == {fitting(batch.sizes, stay)}
    # Only what is needed moves, once.
    moved = batch.moved
    assert moved <= 3 * 2 * 20
    run(scheduler, 20)
    assert batch.moved == moved
    last = Request([3 + order[stay], 4, 5], 30, stop_tokens=[]) if stay < 7 else None
    if last:
        scheduler.submit(last.sequence)
    run(scheduler)
    for request in [requests[i] for i in order[:stay]] + [last] * bool(last):
        assert request.sequence.tokens == alone_past_eos(request.prompt, request.max_tokens)


def test_who_has_few_tokens_to_come_stays_where_it_is():
    batch = FakeBatch(8, 2, 4)
    scheduler = Scheduler(batch)
    requests = [Request([3 + i], MOVED + 4, stop_tokens=[]) for i in range(8)]
    for request in requests:
        scheduler.submit(request.sequence)
    run(scheduler, 8 + 5)
    for request in requests[1:7]:
        scheduler.cancel(request.sequence)
    run(scheduler)
    assert batch.moved == 0 and batch.work[-1][0] == "step"
