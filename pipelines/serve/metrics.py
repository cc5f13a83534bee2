"""Counters, gauges and histograms in Prometheus' text format (exposition format 0.0.4), under vLLM's names.

What vLLM measures too has its name, its labels and its meaning, so that its dashboards and alerts show this server; what it
does not is castiron's. No metric stands there twice.
"""

import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from castiron.pipelines.generation.scheduler import Observer, Scheduler
from castiron.pipelines.generation.sequence import Sequence

# vLLM's, with smaller ones for small models.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
               160.0, 640.0)  # fmt: skip
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
           480.0, 960.0)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# vLLM's words for the ends of a sequence, where they differ.
FINISHED = {"context": "length", "cancelled": "abort"}
# A client may call others by any name.
METHODS = ("GET", "POST", "HEAD", "OPTIONS")
REASONS = ("stop", "length", "abort", "error", "repetition")
# Every model counts in a thread of its own.
_lock = threading.Lock()
Kind = TypeVar("Kind", bound="Metric")


class Metric(ABC):
    """Numbers of one name, a series of them for each set of label values."""

    kind = ""

    def __init__(self, name: str, help: str, *labels: Any):
        self.name, self.help, self.labels = name, help, labels

    def text(self) -> list[str]:
        return [f"# HELP {self.name} {self.help}", f"# TYPE {self.name} {self.kind}", *self.lines()]

    @abstractmethod
    def lines(self) -> list[str]:
        """One for each number."""


class Counter(Metric):
    """Numbers that only grow."""

    kind = "counter"

    def __init__(self, name: str, help: str, *labels: str):
        super().__init__(name, help, *labels)
        self.values: dict[tuple[str, ...], float] = {}

    def add(self, amount: float, *values: str) -> None:
        with _lock:
            self.values[values] = self.values.get(values, 0) + amount

    def lines(self) -> list[str]:
        return [f"{self.name}{_labels(zip(self.labels, v))} {_number(n)}" for v, n in sorted(self.values.items())]


class Gauge(Metric):
    """Numbers that are asked for when they are shown."""

    kind = "gauge"

    def __init__(self, name: str, help: str, *labels: str):
        super().__init__(name, help, *labels)
        self.reads: dict[tuple[str, ...], Callable[[], float]] = {}

    def lines(self) -> list[str]:
        return [f"{self.name}{_labels(zip(self.labels, v))} {_number(read())}" for v, read in sorted(self.reads.items())]


class Series:
    """How many observations were at most each of `bounds`, their sum and their number."""

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float) -> None:
        with _lock:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.sum += value


class Histogram(Metric):
    kind = "histogram"

    def __init__(self, name: str, help: str, bounds: tuple[float, ...], *labels: str):
        super().__init__(name, help, *labels)
        self.bounds, self.series = bounds, dict[tuple[str, ...], Series]()

    def of(self, *values: str) -> Series:
        return self.series.setdefault(values, Series(self.bounds))

    def lines(self) -> list[str]:
        found = []
        for values, series in sorted(self.series.items()):
            labels, below = list(zip(self.labels, values)), 0
            for bound, count in zip((*self.bounds, "+Inf"), list(series.counts)):
                below += count
                found.append(f"{self.name}_bucket{_labels([*labels, ('le', bound)])} {below}")
            found.append(f"{self.name}_sum{_labels(labels)} {_number(series.sum)}")
            found.append(f"{self.name}_count{_labels(labels)} {below}")
        return found


class Metrics:
    """Everything that is measured while serving, of all models."""

    def __init__(self) -> None:
        def of_model(kind: type[Kind], name: str, help: str, *bounds: tuple[float, ...]) -> Kind:
            return kind(name, help, *bounds, "model_name")

        self.running = of_model(Gauge, "vllm:num_requests_running", "Sequences that have a slot.")
        self.waiting = of_model(Gauge, "vllm:num_requests_waiting", "Sequences that wait for a slot.")
        self.usage = of_model(
            Gauge, "vllm:kv_cache_usage_perc", "Positions of all slots that running sequences fill; 1 is all."
        )
        self.slots = of_model(Gauge, "castiron_slots", "Sequences that can run at once.")
        self.prompt_tokens = of_model(Counter, "vllm:prompt_tokens_total", "Tokens of prompts, cached ones included.")
        self.generated = of_model(Counter, "vllm:generation_tokens_total", "Tokens generated.")
        self.cache_queries = of_model(Counter, "vllm:prefix_cache_queries_total", "Tokens of prompts looked up in the cache.")
        self.cache_hits = of_model(Counter, "vllm:prefix_cache_hits_total", "Tokens of prompts that were in the cache.")
        self.steps = of_model(Counter, "castiron_decode_steps_total", "Decode steps; each serves all running sequences.")
        self.preemptions = of_model(
            Counter, "vllm:num_preemptions_total", "Times that a sequence gave its slot to one that goes first."
        )
        self.success = Counter("vllm:request_success_total", "Sequences ended, by how.", "model_name", "finished_reason")
        self.queue = of_model(Histogram, "vllm:request_queue_time_seconds", "From arrival to a slot.", REQUEST)
        self.prefill = of_model(Histogram, "vllm:request_prefill_time_seconds", "From a slot to the first token.", REQUEST)
        self.decode = of_model(Histogram, "vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST)
        self.inference = of_model(Histogram, "vllm:request_inference_time_seconds", "From a slot to the last token.", REQUEST)
        self.whole = of_model(Histogram, "vllm:e2e_request_latency_seconds", "From arrival to the last token.", REQUEST)
        self.first = of_model(Histogram, "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN)
        self.between = of_model(Histogram, "vllm:inter_token_latency_seconds", "From one token to the next.", NEXT_TOKEN)
        self.per_token = of_model(
            Histogram, "vllm:request_time_per_output_token_seconds", "A sequence's mean from token to token.", NEXT_TOKEN
        )
        self.prompts = of_model(Histogram, "vllm:request_prompt_tokens", "Length of prompts.", TOKENS)
        self.answers = of_model(Histogram, "vllm:request_generation_tokens", "Length of answers.", TOKENS)
        self.limits = of_model(Histogram, "vllm:request_params_max_tokens", "Most tokens that an answer may have.", TOKENS)
        self.refused = Counter("vllm:admission_rejections_total", "Requests that there was no room for, by why.", "reason")
        self.http = Counter("http_requests_total", "HTTP requests answered.", "handler", "method", "status")

    def model(self, name: str) -> "ModelMetrics":
        """What counts for the model of this name."""
        return ModelMetrics(self, name)

    def forget(self, name: str) -> None:
        """Of a model that is closed; what it counted stays."""
        for gauge in (self.running, self.waiting, self.usage, self.slots):
            gauge.reads.pop((name,), None)

    def answered(self, path: str, method: str, status: int, code: str | None) -> None:
        """One HTTP request; `code` is that of its refusal."""
        self.http.add(1, path, method if method in METHODS else "other", f"{status // 100}xx")
        if code in ("queue_full", "too_many_bytes"):
            self.refused.add(1, code)

    def text(self) -> str:
        """The page that Prometheus reads."""
        return "\n".join(line for metric in vars(self).values() for line in metric.text()) + "\n"


class ModelMetrics(Observer):
    """Counts what a scheduler does, as its observer."""

    def __init__(self, page: Metrics, name: str):
        self.page, self.name = page, name
        for counter in (page.prompt_tokens, page.generated, page.cache_queries, page.cache_hits, page.steps, page.preemptions):
            counter.add(0, name)
        for reason in REASONS:
            page.success.add(0, name, reason)
        self._series = {key: m.of(name) for key, m in vars(page).items() if isinstance(m, Histogram)}
        self._first, self._between = self._series["first"], self._series["between"]

    def watch(self, scheduler: Scheduler) -> None:
        """Shows what the scheduler holds, until the page forgets the model."""
        page, positions = self.page, scheduler.slots * scheduler.context

        def usage() -> float:
            busy = (*list(scheduler.reading), *list(scheduler.decoding))
            return sum(scheduler.batch.slots[slot].position for slot in busy) / positions

        page.running.reads[self.name,] = lambda: len(scheduler.reading) + len(scheduler.decoding)
        page.waiting.reads[self.name,] = lambda: len(scheduler.waiting)
        page.usage.reads[self.name,] = usage
        page.slots.reads[self.name,] = lambda: scheduler.slots

    def began(self, sequence: Sequence) -> None:
        self.page.cache_queries.add(len(sequence.prompt), self.name)
        self.page.cache_hits.add(sequence.cached, self.name)
        self.page.prompt_tokens.add(len(sequence.prompt), self.name)
        self._series["queue"].observe(sequence.began - sequence.arrived)

    def stepped(self) -> None:
        self.page.steps.add(1, self.name)

    def paused(self, sequence: Sequence) -> None:
        self.page.preemptions.add(1, self.name)

    def token(self, sequence: Sequence, since: float | None) -> None:
        if since is None:
            self._first.observe(sequence.first - sequence.arrived)
        else:
            self._between.observe(since)

    def ended(self, sequence: Sequence, reason: str) -> None:
        now, count, observed = time.monotonic(), len(sequence.tokens), self._series
        reason = "repetition" if sequence.repeated else FINISHED.get(reason, reason)
        self.page.success.add(1, self.name, reason)
        self.page.generated.add(count, self.name)
        observed["whole"].observe(now - sequence.arrived)
        observed["inference"].observe(now - sequence.began)
        observed["prompts"].observe(len(sequence.prompt))
        observed["answers"].observe(count)
        observed["limits"].observe(sequence.limit)
        if sequence.first:
            observed["prefill"].observe(sequence.first - sequence.began)
            observed["decode"].observe(sequence.last - sequence.first)
        if count > 1:
            observed["per_token"].observe((sequence.last - sequence.first) / (count - 1))

    def failed(self, sequence: Sequence) -> None:
        self.page.success.add(1, self.name, "error")

    def embedded(self, tokens: int) -> None:
        """A text that was encoded."""
        self.page.prompt_tokens.add(tokens, self.name)
        self._series["prompts"].observe(tokens)


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
