"""Metrics for Prometheus.

A metric that vLLM also has uses vLLM's name, labels and meaning, so that vLLM's dashboards and
alerts work. The names of the other metrics begin with castiron or http.
"""

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from castiron.pipelines.engine.request import Request
from castiron.pipelines.engine.scheduler import Observer, Scheduler

MEDIA_TYPE = "text/plain; version=0.0.4"
# Upper bounds of the histograms' buckets: vLLM's, with smaller ones for small models.
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
               160.0, 640.0)  # fmt: skip
NEXT_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
REQUEST = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
           480.0, 960.0)  # fmt: skip
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
# vLLM's finish reasons, by the engine's where they differ.
FINISHED = {"context": "length", "cancelled": "abort"}
REASONS = ("stop", "length", "abort", "error", "repetition")
# HTTP methods with their own label. Others share one, because a client may send any number of methods.
METHODS = ("GET", "POST", "HEAD", "OPTIONS")
GAUGES = {
    "running": ("vllm:num_requests_running", "Sequences that have a slot."),
    "waiting": ("vllm:num_requests_waiting", "Sequences that wait for a slot."),
    "usage": ("vllm:kv_cache_usage_perc", "Used positions of all slots; 1 is all."),
    "slots": ("castiron_slots", "Sequences that can run at once."),
}
COUNTERS = {
    "prompt_tokens": ("vllm:prompt_tokens", "Tokens of prompts, with cached ones."),
    "generated": ("vllm:generation_tokens", "Tokens generated."),
    "cache_queries": ("vllm:prefix_cache_queries", "Tokens of prompts looked up in the cache."),
    "cache_hits": ("vllm:prefix_cache_hits", "Tokens of prompts found in the cache."),
    "steps": ("castiron_decode_steps", "Decode steps; each serves all running sequences."),
    "preemptions": ("vllm:num_preemptions", "Sequences preempted by one of higher priority."),
}
HISTOGRAMS = {
    "queue": ("vllm:request_queue_time_seconds", "From arrival to a slot.", REQUEST),
    "prefill": ("vllm:request_prefill_time_seconds", "From a slot to the first token.", REQUEST),
    "decode": ("vllm:request_decode_time_seconds", "From the first token to the last.", REQUEST),
    "inference": ("vllm:request_inference_time_seconds", "From a slot to the last token.", REQUEST),
    "latency": ("vllm:e2e_request_latency_seconds", "From arrival to the last token.", REQUEST),
    "first": ("vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN),
    "between": ("vllm:inter_token_latency_seconds", "From one token to the next.", NEXT_TOKEN),
    "per_token": ("vllm:request_time_per_output_token_seconds", "Mean time from token to token of a sequence.", NEXT_TOKEN),
    "prompts": ("vllm:request_prompt_tokens", "Length of prompts.", TOKENS),
    "answers": ("vllm:request_generation_tokens", "Length of answers.", TOKENS),
    "limits": ("vllm:request_params_max_tokens", "Max tokens of answers.", TOKENS),
}

disable_created_metrics()


class Metrics:
    def __init__(self) -> None:
        registry, model = CollectorRegistry(), ["model_name"]
        self.registry = registry
        self.gauges = {key: Gauge(*names, model, registry=registry) for key, names in GAUGES.items()}
        self.counters = {key: Counter(*names, model, registry=registry) for key, names in COUNTERS.items()}
        self.histograms = {
            key: Histogram(name, text, model, buckets=buckets, registry=registry)
            for key, (name, text, buckets) in HISTOGRAMS.items()
        }
        self.success = Counter(
            "vllm:request_success", "Sequences ended, by reason.", [*model, "finished_reason"], registry=registry
        )
        self.rejected = Counter(
            "vllm:admission_rejections", "Requests rejected for lack of capacity, by reason.", ["reason"], registry=registry
        )
        self.http = Counter("http_requests", "HTTP requests answered.", ["handler", "method", "status"], registry=registry)

    def forget(self, name: str) -> None:
        """Remove the gauges of the closed model `name`; its counters stay."""
        for gauge in self.gauges.values():
            gauge.remove(name)

    def answered(self, path: str, method: str, status: int, code: str | None) -> None:
        """Count an answered HTTP request; `code` is the error code of its response, if any."""
        self.http.labels(path, method if method in METHODS else "other", f"{status // 100}xx").inc()
        if code in ("queue_full", "too_many_bytes"):
            self.rejected.labels(code).inc()

    def text(self) -> str:
        return generate_latest(self.registry).decode()


class ModelMetrics(Observer):
    """An observer that counts the events of one model's scheduler."""

    def __init__(self, page: Metrics, name: str):
        self.page, self.name = page, name
        self._counters = {key: counter.labels(name) for key, counter in page.counters.items()}
        self._histograms = {key: histogram.labels(name) for key, histogram in page.histograms.items()}
        self._success = {reason: page.success.labels(name, reason) for reason in REASONS}

    def watch(self, scheduler: Scheduler) -> None:
        """Connect this model's gauges to `scheduler`, until `Metrics.forget` is called."""
        positions = scheduler.slots * scheduler.context

        def usage() -> float:
            busy = (*list(scheduler.prefilling), *list(scheduler.decoding))
            return sum(scheduler.batch.slots[slot].position for slot in busy) / positions

        found = {
            "running": lambda: len(scheduler.prefilling) + len(scheduler.decoding), "waiting": lambda: len(scheduler.waiting),
            "usage": usage, "slots": lambda: scheduler.slots,
        }  # fmt: skip
        for key, read in found.items():
            self.page.gauges[key].labels(self.name).set_function(read)

    def started(self, request: Request) -> None:
        self._counters["cache_queries"].inc(len(request.prompt))
        self._counters["cache_hits"].inc(request.cached)
        self._counters["prompt_tokens"].inc(len(request.prompt))
        self._histograms["queue"].observe(request.timing.started - request.timing.arrived)

    def stepped(self) -> None:
        self._counters["steps"].inc()

    def preempted(self, request: Request) -> None:
        self._counters["preemptions"].inc()

    def token(self, request: Request, since: float | None) -> None:
        if since is None:
            self._histograms["first"].observe(request.timing.first - request.timing.arrived)
        else:
            self._histograms["between"].observe(since)

    def ended(self, request: Request, reason: str) -> None:
        now, count, observed = time.monotonic(), len(request.tokens), self._histograms
        self._success["repetition" if request.repeated else FINISHED.get(reason, reason)].inc()
        self._counters["generated"].inc(count)
        observed["latency"].observe(now - request.timing.arrived)
        observed["inference"].observe(now - request.timing.started)
        observed["prompts"].observe(len(request.prompt))
        observed["answers"].observe(count)
        observed["limits"].observe(request.limit)
        if request.timing.first:
            observed["prefill"].observe(request.timing.first - request.timing.started)
            observed["decode"].observe(request.timing.last - request.timing.first)
        if count > 1:
            observed["per_token"].observe((request.timing.last - request.timing.first) / (count - 1))

    def failed(self, request: Request) -> None:
        self._success["error"].inc()

    def embedded(self, tokens: int) -> None:
        self._counters["prompt_tokens"].inc(tokens)
        self._histograms["prompts"].observe(tokens)


class _MergedPages(Collector):
    """A Prometheus collector that merges the metrics of several servers."""

    def __init__(self, label: str, pages: Mapping[str, str]):
        self.label, self.pages = label, pages

    def collect(self) -> Iterable[Metric]:
        found: dict[str, Metric] = {}
        for page, text in self.pages.items():
            for family in text_string_to_metric_families(text):
                merged = found.setdefault(family.name, Metric(family.name, family.documentation, family.type))
                merged.samples += [each._replace(labels={self.label: page, **each.labels}) for each in family.samples]
        return found.values()


def labelled(label: str, pages: Mapping[str, str]) -> str:
    """Merge metrics in Prometheus' format, {server: text}; samples get a label of the server."""
    return generate_latest(_MergedPages(label, pages)).decode()
