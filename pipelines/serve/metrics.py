"""Counters, gauges and histograms in Prometheus' text format (exposition format 0.0.4)."""

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping

from castiron.pipelines.generation.scheduler import Observer, Scheduler
from castiron.pipelines.generation.sequence import Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SMALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
# Every model counts in a thread of its own.
_lock = threading.Lock()


class Counter:
    """Numbers that only grow, one for each set of label values."""

    kind = "counter"

    def __init__(self, help: str, *labels: str):
        self.help, self.labels = help, labels
        self.values: dict[tuple, float] = {} if labels else {(): 0}

    def add(self, amount: float = 1, *values: str) -> None:
        with _lock:
            self.values[values] = self.values.get(values, 0) + amount

    def lines(self, name: str) -> list[str]:
        return [f"{name}{_labels(zip(self.labels, v))} {_number(n)}" for v, n in sorted(self.values.items())]


class Gauge:
    """A number that is asked for when it is shown."""

    kind = "gauge"

    def __init__(self, help: str, read: Callable[[], float] = lambda: 0):
        self.help, self.read = help, read

    def lines(self, name: str) -> list[str]:
        return [f"{name} {_number(self.read())}"]


class Histogram:
    """How many observations were at most each of `bounds`, their sum and their number."""

    kind = "histogram"

    def __init__(self, help: str, bounds: tuple[float, ...]):
        self.help, self.bounds = help, bounds
        self.counts, self.sum = [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        with _lock:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value

    def lines(self, name: str) -> list[str]:
        found, below = [], 0
        for bound, count in zip((*self.bounds, "+Inf"), list(self.counts)):
            below += count
            found.append(f"{name}_bucket{_labels([('le', bound)])} {below}")
        return [*found, f"{name}_sum {_number(self.sum)}", f"{name}_count {below}"]


class Metrics(Observer):
    """Everything that is measured while serving; the name on the wire is the attribute's with castiron_ before it.

    As the observer of schedulers it counts what they do, and shows what those hold that it is told to `watch`.
    """

    def __init__(self) -> None:
        self.requests_total = Counter("HTTP requests answered.", "path", "status")
        self.sequences_total = Counter("Sequences ended, by how.", "reason")
        self._watched: list[Scheduler] = []
        total = lambda read: lambda: sum(read(scheduler) for scheduler in list(self._watched))
        self.requests_running = Gauge("Sequences that have a slot.", total(lambda s: len(s.reading) + len(s.decoding)))
        self.requests_waiting = Gauge("Sequences that wait for a slot.", total(lambda s: len(s.waiting)))
        self.slots = Gauge("Sequences that can run at once.", total(lambda s: s.slots))
        self.prompt_tokens_total = Counter("Tokens of prompts, cached ones included.")
        self.prefix_cache_tokens_total = Counter("Tokens of prompts that were in the cache.")
        self.prefix_cache_hits_total = Counter("Prompts of which a part was in the cache.")
        self.prefix_cache_queries_total = Counter("Prompts that were looked up in the cache.")
        self.generated_tokens_total = Counter("Tokens generated.")
        self.decode_steps_total = Counter("Decode steps; each serves all running sequences.")
        self.queue_seconds = Histogram("From a request's arrival to its first chunk of prefill.", SECONDS)
        self.time_to_first_token_seconds = Histogram("From a request's arrival to its first token.", SECONDS)
        self.time_per_token_seconds = Histogram("From one token of a sequence to its next.", SMALL_SECONDS)
        self.request_seconds = Histogram("From a sequence's arrival to its end.", SECONDS)
        self.request_prompt_tokens = Histogram("Length of prompts.", TOKENS)
        self.request_generated_tokens = Histogram("Length of answers.", TOKENS)

    def watch(self, scheduler: Scheduler) -> None:
        self._watched.append(scheduler)

    def forget(self, scheduler: Scheduler) -> None:
        """What it counted stays."""
        self._watched.remove(scheduler)

    def began(self, sequence: Sequence) -> None:
        self.prefix_cache_queries_total.add()
        self.prefix_cache_hits_total.add(sequence.cached > 0)
        self.prefix_cache_tokens_total.add(sequence.cached)
        self.prompt_tokens_total.add(len(sequence.prompt))
        self.queue_seconds.observe(sequence.began - sequence.arrived)

    def stepped(self) -> None:
        self.decode_steps_total.add()

    def token(self, sequence: Sequence, since: float | None) -> None:
        if since is None:
            self.time_to_first_token_seconds.observe(sequence.first - sequence.arrived)
        else:
            self.time_per_token_seconds.observe(since)

    def ended(self, sequence: Sequence, reason: str) -> None:
        self.sequences_total.add(1, reason)
        self.generated_tokens_total.add(len(sequence.tokens))
        self.request_seconds.observe(time.monotonic() - sequence.arrived)
        self.request_prompt_tokens.observe(len(sequence.prompt))
        self.request_generated_tokens.observe(len(sequence.tokens))

    def failed(self, sequence: Sequence) -> None:
        self.sequences_total.add(1, "failed")

    def text(self) -> str:
        """The page that Prometheus reads."""
        lines = []
        for attribute, metric in vars(self).items():
            if attribute == "_watched":
                continue
            name = f"castiron_{attribute}"
            lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}", *metric.lines(name)]
        return "\n".join(lines) + "\n"


def labelled(label: str, pages: Mapping[str, str]) -> str:
    """The pages of several as one: every sample with `label` and the name of the page that it is from."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for page, text in pages.items():
        metric = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                metric = line.split(" ", 3)[2]
                heads[metric] = []
            if line.startswith("#"):
                heads[metric].append(line)
                continue
            name, _, rest = line.partition(" ") if "{" not in line else line.partition("{")
            pair = _labels([(label, page)])
            sample = f"{name}{pair} {rest}" if "{" not in line else f"{name}{pair[:-1]},{rest}"
            samples.setdefault(metric, []).append(sample)
    return "".join(f"{line}\n" for metric, head in heads.items() for line in [*head, *samples.get(metric, [])])


def _labels(pairs) -> str:
    escaped = [(n, str(v).replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for n, v in pairs]
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}" if escaped else ""


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))
