"""Actors and replicas that are slow or die, for tests; Ray's workers import this module."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

from castiron.pipelines.cluster.actors import BatchActor, Generate
from castiron.pipelines.cluster.deployment import Replica
from castiron.vmfb.run.session import Batch

# The environment variable with the folder where actors write notes.
NOTES = "CASTIRON_TEST_NOTES"


class DyingGenerate(Generate):
    """An actor that notes its batches; the first actor dies in its third batch."""

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
        # Wait, so that rows are left for the node that joins after the death.
        until = time.monotonic() + 200 * died.exists()
        while len({path.read_text().split("\n")[0] for path in notes.glob("*.jsonl")}) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        return super().__call__(batch)


class DyingEngine(BatchActor):
    """An actor on a node without the bundle; the first one dies in its second window."""

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


# Minimum seconds of a step of a slow replica, because the small model answers too fast to observe.
STEP = 0.02


class SlowReplica(Replica):
    """A replica that answers slowly and reports its state."""

    async def __init__(self, *arguments):
        step = Batch.step

        def slow(*given):
            time.sleep(STEP)
            return step(*given)

        Batch.step = slow  # type: ignore[method-assign]
        await Replica.__init__(self, *arguments)

    async def state(self) -> tuple[int, int]:
        """Return its process id, and the number of sequences it runs."""
        return os.getpid(), self.app.api.engine.unfinished
