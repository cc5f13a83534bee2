"""The rows of a batch job on a cluster: an actor on every node, each with a window of rows at a time."""

from __future__ import annotations

import argparse
import contextlib
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from castiron.pipelines.batch.job import Answer, Answered, Keyed, answering
from castiron.pipelines.batch.requests import Outcome, Requests
from castiron.pipelines.cluster.places import Stored, bundle_at, store
from castiron.pipelines.errors import PipelineError, user_errors
from castiron.pipelines.generation.scheduler import Scheduler
from castiron.pipelines.progress import say
from castiron.vmfb.bundle import Bundle, open_bundle
from castiron.vmfb.manifest import BundleError, dump

# Rows that are handed to an actor at once, at most and, while there are as many, at least; and how many such windows it has,
# so that it never waits for its next.
WINDOW, LEAST, AHEAD = 128, 16, 2
# Engines that may die of the same rows.
DEATHS = 3
# Seconds after which is seen which nodes have come, which rows where those come slowly, and after which is said that no node
# has.
LOOK, SOON, PATIENCE = 2.0, 0.2, 30.0

# That of `castiron batch`: arguments and a bundle to what makes rows into work, and to what runs it.
Prepare = Callable[[argparse.Namespace, Bundle], tuple[Requests, Scheduler | None]]


class Engine:
    """One node's engine: it opens the bundle when it is first asked, so that a refusal is an answer and no death."""

    def __init__(self, args: argparse.Namespace, path: Path, manifest: bytes, prepare: Prepare):
        self.args, self.path, self.manifest, self.prepare = args, path, manifest, prepare
        self.answer: Answer | None = None

    def has_bundle(self) -> bool:
        """Whether what lies at the path here is the very bundle that it is there."""
        try:
            return dump(open_bundle(self.path, run=False).manifest) == self.manifest
        except (BundleError, OSError):
            return False

    def answers(self, rows: list[Keyed], stored: Stored | None) -> list[tuple[int, Outcome]]:
        """What becomes of some rows, by their index; `stored` where there is no bundle at the path."""
        if self.answer is None:
            # What --verify-key says was asked of the manifest, which is the same here.
            found = open_bundle(self.path if stored is None else bundle_at(stored), full_check=self.args.trust == "never")
            # By the name that it has there.
            requests, scheduler = self.prepare(self.args, replace(found, path=self.path))
            self.answer = answering(scheduler, requests)
        return [(row.index, outcome) for row, _, outcome in self.answer(iter(rows))]


class Engines:
    """The engines of a cluster: one for every `--threads` CPUs of every node, those that come during the job too."""

    def __init__(self, args: argparse.Namespace, bundle: Bundle, prepare: Prepare):
        plain = (str, int, float, list, dict, type(None))
        self.args = {name: value for name, value in vars(args).items() if isinstance(value, plain)}
        self.bundle, self.manifest, self.prepare = bundle, dump(bundle.manifest), prepare
        # By node and number; what each was asked first, until it has said so; where its bundle comes from.
        self.actors: dict[tuple[str, int], Any] = {}
        self.starting: dict[ray.ObjectRef, tuple[str, int]] = {}
        self.ready: dict[tuple[str, int], Stored | None] = {}
        self._stored: Stored | None = None
        self.patient_until = time.monotonic() + PATIENCE

    def look(self) -> None:
        """Starts an engine wherever there is none and may be one."""
        for node in ray.nodes():
            cpus = int(node["Resources"].get("CPU", 0)) if node["Alive"] else 0
            threads = min(self.args["threads"] or cpus, cpus)
            for number in range(cpus // threads if threads else 0):
                if (at := (node["NodeID"], number)) not in self.actors:
                    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                    options = argparse.Namespace(**{**self.args, "threads": threads})
                    made = ray.remote(Engine).options(num_cpus=threads, scheduling_strategy=where)
                    self.actors[at] = made.remote(options, self.bundle.path.resolve(), self.manifest, self.prepare)
                    self.starting[self.actors[at].has_bundle.remote()] = at

    def started(self, asked: ray.ObjectRef) -> None:
        """An engine has said whether it has the bundle."""
        at = self.starting.pop(asked)
        try:
            if not ray.get(asked) and self._stored is None:
                self._stored = store(self.bundle)
            self.ready[at] = None if ray.get(asked) else self._stored
        except RayActorError:
            self.lost(at)

    def wait(self, running: list[ray.ObjectRef], seconds: float) -> list[ray.ObjectRef]:
        """What is done within some seconds of the calls that run and of those that ask engines whether they are ready."""
        if not running and not self.ready and time.monotonic() > self.patient_until:
            say("no node of the cluster has had CPUs for this job so far; waiting for one")
            self.patient_until = math.inf
        if waiting := [*running, *self.starting]:
            return ray.wait(waiting, timeout=seconds)[0]
        time.sleep(seconds)
        return []

    def ask(self, at: tuple[str, int], rows: list[Keyed]) -> ray.ObjectRef:
        return self.actors[at].answers.remote(rows, self.ready[at])

    def lost(self, at: tuple[str, int]) -> None:
        """It has died; another may stand in its place."""
        self.actors.pop(at, None)
        self.ready.pop(at, None)

    def end(self) -> None:
        for actor in self.actors.values():
            ray.kill(actor)


class Windows:
    """Rows in windows: whole ones while there are many, smaller ones towards the end, so that all engines end together."""

    def __init__(self, rows: Iterator[Keyed | None]):
        self.rows, self.held = rows, deque[Keyed]()
        # Those that engines died of, or with.
        self.again: deque[list[Keyed]] = deque()
        self.ended = False

    def next(self, engines: int) -> list[Keyed]:
        """A window for one of so many engines; empty where there is none, or none yet."""
        if self.again:
            return self.again.popleft()
        while not self.ended and len(self.held) < engines * AHEAD * WINDOW:
            try:
                row = next(self.rows)
            except StopIteration:
                self.ended = True
                break
            if row is None:
                break
            self.held.append(row)
        size = min(WINDOW, max(LEAST, len(self.held) // (engines * AHEAD)))
        return [self.held.popleft() for _ in range(min(size, len(self.held)))]

    @property
    def done(self) -> bool:
        return self.ended and not self.held and not self.again


def answering_on_cluster(args: argparse.Namespace, bundle: Bundle, prepare: Prepare) -> Answer:
    """Answers rows on the cluster that this process is connected to, as `castiron batch` would with these arguments."""

    def answer(rows: Iterator[Keyed | None]) -> Iterator[Answered]:
        engines, windows = Engines(args, bundle, prepare), Windows(rows)
        running: dict[ray.ObjectRef, tuple[tuple[str, int], list[Keyed]]] = {}
        deaths: dict[int, int] = {}
        try:
            while True:
                engines.look()
                # One for each before any has its second.
                for ahead in range(AHEAD):
                    for at in engines.ready:
                        asked = sum(other == at for other, _ in running.values())
                        if asked == ahead and (window := windows.next(len(engines.actors))):
                            running[engines.ask(at, window)] = at, window
                if not running and engines.ready and windows.done:
                    return
                for done in engines.wait(list(running), LOOK if windows.ended else SOON):
                    if done in engines.starting:
                        engines.started(done)
                        continue
                    if done not in running:
                        # It was with an engine that died.
                        continue
                    at, window = running.pop(done)
                    try:
                        found = dict(_result(done))
                    except RayActorError:
                        engines.lost(at)
                        lost = [asked for asked, (other, _) in running.items() if other == at]
                        windows.again += [window, *(running.pop(asked)[1] for asked in lost)]
                        _count_death(deaths, window)
                        continue
                    for row, key in window:
                        yield row, key, found[row.index]
        finally:
            engines.end()

    return answer


def _count_death(deaths: dict[int, int], window: list[Keyed]) -> None:
    """One more engine has died of this window; PipelineError for the last that may."""
    first, last = window[0][0].index, window[-1][0].index
    deaths[first] = deaths.get(first, 0) + 1
    if deaths[first] == DEATHS:
        raise PipelineError(
            f"{DEATHS} engines died one after another on rows {first} to {last}; Ray's logs say how, and what is done so far "
            "is kept"
        ) from None


def _result(asked: ray.ObjectRef) -> Any:
    """What a call came to; of a refusal the sentence itself."""
    try:
        return ray.get(asked)
    except RayTaskError as error:
        if isinstance(error.cause, user_errors()):
            raise error.cause from None
        raise


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """A connection to the cluster at `address`, or to one of this machine's own that ends with it, for `local`; PipelineError
    where none answers. One that the process has already is used."""
    if ray.is_initialized():
        yield
        return
    own = {"include_dashboard": False} if address == "local" else {}
    try:
        host, _, port = address.rpartition(":")
        if host and port.isdigit():
            # Ray itself goes on asking for minutes.
            socket.create_connection((host, int(port)), 5).close()
        ray.init(address, log_to_driver=False, logging_level="error", **own)
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise PipelineError(f"no cluster of Ray can be joined at {address}: {reason}") from None
    try:
        yield
    finally:
        ray.shutdown()
