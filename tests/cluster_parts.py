"""What Ray's workers import of the tests: actors and replicas as castiron's own, but slow, or dying when a test wants it."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from castiron.pipelines.cluster.batch import Engine
from castiron.pipelines.cluster.rows import Generate
from castiron.pipelines.cluster.serving import Replica
from castiron.vmfb.batch import Batch

# The variable that names the folder where they write.
NOTES = "CASTIRON_TEST_NOTES"


class DiesOnce(Generate):
    """Writes down who ran a batch, takes its time, and the first of them ends in its third batch."""

    def __call__(self, batch):
        import ray

        context, notes = ray.get_runtime_context(), Path(os.environ[NOTES])
        mine = notes / f"{os.getpid()}.jsonl"
        with open(mine, "a") as file:
            file.write(json.dumps({"node": context.get_node_id(), "threads": self.model.threads}) + "\n")
        died = notes / "died"
        if len(mine.read_text().splitlines()) == 3 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        # Work is left for the node that comes then, however long it takes to come.
        until = time.monotonic() + 200 * died.exists()
        while (
            len({line for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()}) < 2
            and time.monotonic() < until
        ):
            time.sleep(0.05)
        return super().__call__(batch)


class EngineThatDiesOnce(Engine):
    """The engine of a batch job on a node without the bundle, the first of which ends in its second window."""

    def has_bundle(self):
        return False

    def answers(self, *given):
        found = super().answers(*given)
        died = Path(os.environ[NOTES]) / "engine-died"
        if self.__dict__.setdefault("windows", 0) == 1 and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.windows += 1
        return found


# Seconds that a step of a slow replica takes at least: the small model answers faster than a test can look.
STEP = 0.02


class SlowReplica(Replica):
    """A replica whose answers take a while, and which tells of itself."""

    async def __init__(self, *arguments):
        step = Batch.step

        def slow(*given):
            time.sleep(STEP)
            return step(*given)

        Batch.step = slow  # type: ignore[method-assign]
        await Replica.__init__(self, *arguments)

    async def state(self) -> tuple[int, int]:
        """Its process, and how many sequences it runs."""
        return os.getpid(), self.app.api.engine.unfinished
