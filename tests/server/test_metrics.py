"""The page /metrics: its format for Prometheus, vLLM's names, and the Grafana dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from castiron.pipelines.engine.scheduler import Scheduler
from castiron.pipelines.server.metrics import Metrics, ModelMetrics
from tests.engine.test_scheduler import CONTEXT, Asked, FakeBatch, run

DOCS = Path(__file__).parents[2] / "docs"
# Metrics of the dashboards in vLLM's examples/observability, without those of GPUs and adapters.
VLLM = """
num_requests_running num_requests_waiting kv_cache_usage_perc prompt_tokens_total generation_tokens_total
prefix_cache_queries_total prefix_cache_hits_total request_success_total time_to_first_token_seconds_bucket
inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket request_queue_time_seconds_sum
request_prefill_time_seconds_sum request_decode_time_seconds_sum request_inference_time_seconds_bucket
request_prompt_tokens_bucket request_generation_tokens_bucket request_params_max_tokens_bucket
request_time_per_output_token_seconds_bucket
""".split()


@pytest.fixture(scope="module")
def page() -> str:
    """The page of two models; one has finished three requests and runs a fourth."""
    metrics = Metrics()
    ModelMetrics(metrics, "idle")
    counting = ModelMetrics(metrics, 'a "model"\\')
    scheduler = Scheduler(FakeBatch(2), observer=counting)
    counting.watch(scheduler)
    for i in range(3):
        scheduler.submit(Asked([3, 4, 5], 4 + i, stop_tokens=[]).request)
        run(scheduler)
    scheduler.submit(Asked([5] * 10, 50, stop_tokens=[]).request)
    run(scheduler, 3)
    scheduler.cancel(gone := Asked([3], 4).request)
    scheduler.submit(gone)
    metrics.answered("/v1/completions", "POST", 503, "queue_full")
    metrics.answered("other", "BREW", 404, None)
    return metrics.text()


def samples(page: str) -> dict[str, list[tuple[dict, float]]]:
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(page):
        assert family.type in ("counter", "gauge", "histogram") and family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_prometheus_reads_what_was_counted(page):
    found = samples(page)

    def of(name: str, **labels: str) -> float:
        (value,) = (v for own, v in found[name] if own == {"model_name": 'a "model"\\'} | labels)
        return value

    assert of("vllm:num_requests_running") == of("vllm:num_requests_waiting") == 1
    assert of("castiron_slots") == 2 and of("vllm:generation_tokens_total") == 4 + 5 + 6
    assert of("vllm:prompt_tokens_total") == of("vllm:prefix_cache_queries_total") == 3 * 3 + 10
    assert of("vllm:prefix_cache_hits_total") == 2 + 2
    assert of("vllm:request_success_total", finished_reason="length") == 3
    assert 10 / (2 * CONTEXT) < of("vllm:kv_cache_usage_perc") < 15 / (2 * CONTEXT)
    assert of("vllm:request_prompt_tokens_bucket", le="2.0") == 0 and of("vllm:request_prompt_tokens_bucket", le="5.0") == 3
    assert of("vllm:time_to_first_token_seconds_count") == 4 and of("vllm:e2e_request_latency_seconds_count") == 3
    # The queue histogram also has the running fourth request.
    parts = sum(of(f"vllm:request_{part}_time_seconds_sum") for part in ("prefill", "decode"))
    assert 0 < parts <= of("vllm:e2e_request_latency_seconds_sum")
    assert of("vllm:request_queue_time_seconds_count") == 4 and of("vllm:request_prefill_time_seconds_count") == 3
    assert ({"reason": "queue_full"}, 1) in found["vllm:admission_rejections_total"]
    assert ({"handler": "other", "method": "other", "status": "4xx"}, 1) in found["http_requests_total"]
    assert {own["model_name"] for own, _ in found["vllm:prompt_tokens_total"]} == {"idle", 'a "model"\\'}


def test_vllms_dashboards_find_what_they_ask_for(page):
    found = samples(page)
    assert [name for name in VLLM if f"vllm:{name}" not in found] == []
    assert all("model_name" in own for name in VLLM for own, _ in found[f"vllm:{name}"])


def test_every_query_of_the_dashboard_names_metrics_and_labels_that_there_are(page):
    found, board = samples(page), json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    (models,) = (v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query")
    for query in [*queries, models]:
        names = re.findall(r"(?:vllm:|castiron_|http_)\w+", query)
        assert names and all(name in found for name in names), query
        asked = [label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")]
        asked += re.findall(r"[{,]\s*(\w+)=~", query)
        assert all(label in found[names[0]][0][0] for label in asked), query
        assert query.count("(") == query.count(")")
    assert len(queries) >= 14 and len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
