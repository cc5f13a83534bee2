"""Ray actors that answer prompts: `Generate` for Ray datasets, `BatchActor` for batch jobs."""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from castiron.pipelines.batch.job import Answer, Answered, answering
from castiron.pipelines.batch.records import Conversion, Outcome, Record
from castiron.pipelines.cluster.bundle_source import BundleSource, Stored, bundle_at, store
from castiron.pipelines.engine.engine import Engine
from castiron.pipelines.errors import PipelineError, user_errors
from castiron.pipelines.model import GenerationOptions, Model
from castiron.pipelines.terminal import print_message
from castiron.pipelines.text.generate import Result
from castiron.vmfb.bundle.bundle import Bundle, open_bundle
from castiron.vmfb.bundle.manifest import BundleError, dump

if TYPE_CHECKING:
    import pyarrow as pa

# Columns that `Generate` adds to a row.
ANSWER = ("generated", "finish_reason", "generated_tokens", "error")
# Each call of an actor answers a window of records: max records of a window, min records, and max calls of an actor in
# flight. With two calls, the actor never waits for records.
MAX_WINDOW, MIN_WINDOW, WINDOWS_AHEAD = 128, 16, 2
# The job fails if this many actors die while they run the same records.
MAX_DEATHS = 3
# Seconds between checks for new nodes and for new records, and seconds without a node until a message is printed.
NODE_POLL, RECORD_POLL, NODE_WAIT = 2.0, 0.2, 30.0

# `prepare` of `castiron batch`: takes the command's arguments and a bundle, and returns the converter of records and the
# engine.
Prepare = Callable[[argparse.Namespace, Bundle], tuple[Conversion, Engine | None]]
# The id of a node, and the index of an actor on that node.
Slot = tuple[str, int]


class Generate:
    """An actor for `Dataset.map_batches` that generates an answer for each row:

        dataset.map_batches(
            castiron.ray.Generate, fn_constructor_args=["/models/smollm2.castiron"],
            fn_constructor_kwargs={"max_tokens": 64}, batch_format="pyarrow", batch_size=64,
            num_cpus=2, compute=ray.data.ActorPoolStrategy(size=4),
        )

    A row has a column `prompt` (text) or `messages`. The columns ANSWER are added. An answer does
    not depend on other rows, or on the actor.
    """

    def __init__(
        self, bundle: BundleSource, *, prompt: str = "prompt", messages: str = "messages", threads: int | None = None,
        **options: Unpack[GenerationOptions],
    ):  # fmt: skip
        """Load the bundle.

        bundle: path on every node, URL for fsspec, or result of `castiron.ray.store`. prompt,
        messages: names of the columns. threads: by default the actor's CPUs. options: those of
        `Model.generate`.
        """
        self.prompt, self.messages, self.options = prompt, messages, options
        self.model = Model(bundle_at(bundle), threads or cpus_of_actor())

    def __call__(self, batch: pa.Table) -> pa.Table:
        if not hasattr(batch, "column_names"):
            raise PipelineError(f'unsupported batch: {type(batch).__name__}; give batch_format="pyarrow" to map_batches')
        names = batch.column_names
        if taken := [name for name in ANSWER if name in names]:
            raise PipelineError(f"the rows already have a column {taken[0]}, in which answers are stored; rename or drop it")
        if not {self.prompt, self.messages} & set(names):
            raise PipelineError(
                f"the rows have only the columns {', '.join(names)}; add a column {self.prompt} or {self.messages}"
            )
        columns = [batch.column(name).to_pylist() for name in (self.prompt, self.messages) if name in names]
        return _with_answers(batch, self.answers([_prompt(values) for values in zip(*columns)]))

    def answers(self, prompts: Sequence[Any]) -> list[Result]:
        """Return the results in the order of `prompts`; an invalid prompt's has an error."""
        order = sorted(range(len(prompts)), key=lambda index: str(prompts[index]))
        results = self.model.generate_many([prompts[index] for index in order], **self.options)
        return sorted((replace(result, index=order[result.index]) for result in results), key=lambda result: result.index)


def cpus_of_actor() -> int | None:
    """Return the number of CPUs that Ray gave to this actor; None outside an actor."""
    if not ray.is_initialized():
        return None
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 0)))


def _prompt(values: Sequence[Any]) -> Any:
    from castiron.pipelines.batch.parquet import without_nulls

    given = [value for value in values if value is not None]
    return without_nulls(given[0]) if len(given) == 1 else None


def _with_answers(batch: pa.Table, results: Sequence[Result]) -> pa.Table:
    import pyarrow as pa

    rows = [(r.text, None, None, str(r.error)) if r.error else (r.text, r.finish_reason, len(r.tokens), None) for r in results]
    for i, name in enumerate(ANSWER):
        type_ = pa.int64() if name == "generated_tokens" else pa.string()
        batch = batch.append_column(name, pa.array([row[i] for row in rows], type_))
    return batch


class BatchActor:
    """A Ray actor that answers records of a batch job; its first call opens the bundle."""

    def __init__(self, args: argparse.Namespace, path: Path, manifest: bytes, prepare: Prepare):
        self.args, self.path, self.manifest, self.prepare = args, path, manifest, prepare
        self.answer: Answer | None = None

    def has_bundle(self) -> bool:
        """Return whether this actor's node has the job's bundle, at the same path."""
        try:
            return dump(open_bundle(self.path, run=False).manifest) == self.manifest
        except (BundleError, OSError):
            return False

    def answers(self, records: list[Record], stored: Stored | None) -> list[tuple[int, Outcome]]:
        """Return (index of the record in the job, its outcome) of each record.

        stored: the bundle to fetch; None if the node already has it.
        """
        if self.answer is None:
            found = open_bundle(self.path if stored is None else bundle_at(stored), full_check=self.args.trust == "never")
            # Set the job's path, because requests may name the model by the file name of the bundle.
            conversion, engine = self.prepare(self.args, replace(found, path=self.path))
            self.answer = answering(engine, conversion)
        return [(record.index, outcome) for record, outcome in self.answer(iter(records))]


class ActorPool:
    """The Ray actors of a batch job, on all nodes of the cluster.

    With --threads T, a node with C CPUs runs C // T actors; otherwise one, which uses all CPUs.
    """

    def __init__(self, args: argparse.Namespace, bundle: Bundle, prepare: Prepare):
        plain = (str, int, float, list, dict, type(None))
        self.args = {name: value for name, value in vars(args).items() if isinstance(value, plain)}
        self.bundle, self.manifest, self.prepare = bundle, dump(bundle.manifest), prepare
        self.actors: dict[Slot, Any] = {}
        # Calls of `has_bundle` in progress. For each ready actor: the bundle to fetch, or None if its node has the bundle.
        self.starting: dict[ray.ObjectRef, Slot] = {}
        self.ready: dict[Slot, Stored | None] = {}
        self._stored: Stored | None = None
        self.message_time = time.monotonic() + NODE_WAIT

    def start_missing(self) -> None:
        """Start actors on new nodes, and replace actors that have died."""
        for node in ray.nodes():
            cpus = int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
            threads = min(self.args["threads"] or cpus, cpus)
            for number in range(cpus // threads if threads else 0):
                if (slot := (node["NodeID"], number)) not in self.actors:
                    strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    options = argparse.Namespace(**{**self.args, "threads": threads})
                    actor = ray.remote(BatchActor).options(num_cpus=threads, scheduling_strategy=strategy)
                    self.actors[slot] = actor.remote(options, self.bundle.path.resolve(), self.manifest, self.prepare)
                    self.starting[self.actors[slot].has_bundle.remote()] = slot

    def finish_start(self, call: ray.ObjectRef) -> None:
        """Mark a new actor as ready after its call of `has_bundle`, or remove it if it died."""
        slot = self.starting.pop(call)
        try:
            has_bundle = ray.get(call)
        except RayActorError:
            self.remove(slot)
            return
        if not has_bundle and self._stored is None:
            self._stored = store(self.bundle)
        self.ready[slot] = None if has_bundle else self._stored

    def wait(self, running: list[ray.ObjectRef], seconds: float) -> list[ray.ObjectRef]:
        """Wait until a call of `running` or of a starting actor ends; return [it] or []."""
        if not running and not self.ready and time.monotonic() > self.message_time:
            print_message("no node of the cluster has free CPUs for this job yet; waiting for one")
            self.message_time = math.inf
        if calls := [*running, *self.starting]:
            return ray.wait(calls, timeout=seconds)[0]
        time.sleep(seconds)
        return []

    def remove(self, slot: Slot) -> None:
        """Remove a dead actor, so that `start_missing` starts it again."""
        self.actors.pop(slot, None)
        self.ready.pop(slot, None)


class Windows:
    """The records of a job in groups ("windows"), each the input of one call of an actor.

    They get smaller towards the end, so that all actors finish at about the same time.
    """

    def __init__(self, records: Iterator[Record | None]):
        self.records, self.waiting = records, deque[Record]()
        # Windows to run again, because their actors died.
        self.again: deque[list[Record]] = deque()
        self.ended = False

    def next(self, actors: int) -> list[Record]:
        """Return the records of the next window; [] if no records are available now."""
        if self.again:
            return self.again.popleft()
        while not self.ended and len(self.waiting) < actors * WINDOWS_AHEAD * MAX_WINDOW:
            try:
                record = next(self.records)
            except StopIteration:
                self.ended = True
                break
            if record is None:
                break
            self.waiting.append(record)
        size = min(MAX_WINDOW, max(MIN_WINDOW, len(self.waiting) // (actors * WINDOWS_AHEAD)))
        return [self.waiting.popleft() for _ in range(min(size, len(self.waiting)))]

    @property
    def done(self) -> bool:
        """Whether all records have been given to actors."""
        return self.ended and not self.waiting and not self.again


def answering_on_cluster(args: argparse.Namespace, bundle: Bundle, prepare: Prepare) -> Answer:
    """Return a function that answers the records of a batch job on the connected Ray cluster."""

    def answer(records: Iterator[Record | None]) -> Iterator[Answered]:
        pool, windows = ActorPool(args, bundle, prepare), Windows(records)
        running: dict[ray.ObjectRef, tuple[Slot, list[Record]]] = {}
        deaths: Counter[int] = Counter()
        try:
            while True:
                pool.start_missing()
                # Every actor gets one window before any actor gets its second.
                for ahead in range(WINDOWS_AHEAD):
                    for slot, stored in pool.ready.items():
                        given = sum(other == slot for other, _ in running.values())
                        if given == ahead and (window := windows.next(len(pool.actors))):
                            running[pool.actors[slot].answers.remote(window, stored)] = slot, window
                if not running and pool.ready and windows.done:
                    return
                for call in pool.wait(list(running), NODE_POLL if windows.ended else RECORD_POLL):
                    if call in pool.starting:
                        pool.finish_start(call)
                        continue
                    if call not in running:
                        # The actor of this call has died, and its window runs again.
                        continue
                    slot, window = running.pop(call)
                    try:
                        found = dict(_result(call))
                    except RayActorError:
                        pool.remove(slot)
                        lost = [other for other, (its_slot, _) in running.items() if its_slot == slot]
                        windows.again += [window, *(running.pop(other)[1] for other in lost)]
                        first, last = window[0].index, window[-1].index
                        deaths[first] += 1
                        if deaths[first] == MAX_DEATHS:
                            raise PipelineError(
                                f"{MAX_DEATHS} actors died while they ran records {first} to {last}; see Ray's logs, then "
                                "run the same command to continue"
                            ) from None
                        continue
                    for record in window:
                        yield record, found[record.index]
        finally:
            for actor in pool.actors.values():
                ray.kill(actor)

    return answer


def _result(call: ray.ObjectRef) -> Any:
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, user_errors()):
            raise error.cause from None
        raise


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to the Ray cluster at `address` for a `with` block, unless the process is connected.

    The address "local" starts a cluster on this machine.
    """
    if ray.is_initialized():
        yield
        return
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            # A quick check, because Ray itself retries for minutes.
            socket.create_connection((host, int(port)), 5).close()
        ray.init(address, log_to_driver=False, logging_level="error", **local)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise PipelineError(f"cannot connect to the Ray cluster at {address}: {reason}; check the address") from None
    try:
        yield
    finally:
        ray.shutdown()
