"""Metrics, traces and JSON logs of one real server under a scripted load; its collector ends before it does.

The tests build on each other in their order: the first one makes the first request.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.otlp_collector import Collector, Received, otlp_collector
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

ROUTER, SHARD = "test.service", "test.service"
SERVER_KIND, CLIENT_KIND = 2, 3
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALL = "/generate.v3.TextGenerationService/"
METHODS = ("prefill", "decode")
# What the panels of TGI's Grafana dashboard select: a name, and the labels that they filter by.
DASHBOARD: list[tuple[str, dict[str, str]]] = [
    ("tgi_request_count", {}),
    ("tgi_request_success", {}),
    ("tgi_request_failure", {}),
    ("tgi_request_failure", {"err": "overloaded"}),
    ("tgi_queue_size", {}),
    ("tgi_batch_current_size", {}),
    ("tgi_batch_current_max_tokens", {}),
    ("tgi_batch_concat", {"reason": "backpressure"}),
    ("tgi_batch_concat", {"reason": "wait_exceeded"}),
    *[
        (f"tgi_request_{name}_{form}", {})
        for name in (
            "duration", "queue_duration", "mean_time_per_token_duration", "generated_tokens", "input_length",
            "skipped_tokens", "validation_duration", "inference_duration", "max_new_tokens",
        )
        for form in ("bucket", "sum", "count")
    ],
    *[
        (f"tgi_batch_{name}_duration_{form}", {"method": method})
        for name in ("inference", "forward", "decode", "filter")
        for form in ("bucket", "sum", "count")
        for method in METHODS
    ],
    *[(f"tgi_batch_concat_duration_{form}", {"method": "decode"}) for form in ("bucket", "sum", "count")],
]  # fmt: skip


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with otlp_collector() as made:
        yield made


@pytest.fixture(scope="module")
def server(llama: Path, collector: Collector) -> Iterator[RunningServer]:
    with running_server(
        llama, "--dtype", "float32", "--max-total-tokens", "256", "--max-batch-prefill-tokens", "512",
        "--max-concurrent-requests", "3", "--json-output", "--otlp-endpoint", collector.endpoint,
        "--otlp-service-name", "test.service",
        environ={"LOG_LEVEL": "warn,router=info,text_generation_server=info"},
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as opened:
        yield opened


def series(client: httpx.Client) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by its bare name and labels."""
    text = client.get("/metrics").text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser writes OpenMetrics' ending behind the name of a counter.
            name = family.name if family.type == "counter" else sample.name
            assert f"\n{name}" in text
            found[name, frozenset(sample.labels.items())] = sample.value
    return found


def value(found: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def test_the_dashboard_finds_its_series_after_one_request(client: httpx.Client) -> None:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 4, "ignore_eos": True}}
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    assert client.post("/generate", json=body, headers=headers).status_code == 200
    found = series(client)
    for name, labels in DASHBOARD:
        assert any(one == name and labels.items() <= set(given) for one, given in found), (name, labels)
    assert value(found, "tgi_request_count") == value(found, "tgi_request_success") == 1
    assert value(found, "tgi_batch_max_total_tokens") >= 256
    for name in ("input_length", "generated_tokens", "duration", "time_to_first_token_duration"):
        assert value(found, f"tgi_request_{name}_count") == 1
    assert value(found, "tgi_request_generated_tokens_sum") == 4
    assert value(found, "tgi_request_inter_token_duration_count") == 3
    assert value(found, "tgi_request_skipped_tokens_count") == 4
    assert value(found, "tgi_batch_inference_success", method="prefill") == 1
    assert value(found, "tgi_batch_inference_success", method="decode") >= 3


def descends(span: Received, ancestor: Received, spans: list[Received]) -> bool:
    by_id = {one.span_id: one for one in spans}
    while span.parent_id in by_id:
        span = by_id[span.parent_id]
        if span is ancestor:
            return True
    return False


def test_one_trace_from_the_client_to_the_shard(collector: Collector) -> None:
    def is_complete(spans: list[Received]) -> bool:
        names = [span.name for span in spans if span.trace_id == TRACE]
        return "generate" in names and names.count(CALL + "Prefill") == 2 and names.count(CALL + "Decode") >= 6

    spans = [span for span in collector.wait(is_complete) if span.trace_id == TRACE]
    request = next(span for span in spans if span.name == "generate")
    assert (request.parent_id, request.kind, request.service) == (PARENT, SERVER_KIND, ROUTER)
    assert request.attributes["http.response.status_code"] == 200
    for name in ("total_time", "validation_time", "queue_time", "inference_time", "time_per_token", "seed"):
        assert name in request.attributes
    for name in ("validate", "queued", "infer"):
        (span,) = [one for one in spans if one.name == name]
        assert span.parent_id == request.span_id
        assert request.start <= span.start <= span.end <= request.end
    infer = next(one for one in spans if one.name == "infer")
    for name in ("Prefill", "Decode"):
        calls = [one for one in spans if one.name == CALL + name]
        clients = {one.span_id: one for one in calls if one.kind == CLIENT_KIND}
        servers = [one for one in calls if one.kind == SERVER_KIND]
        assert servers and all(one.parent_id in clients and one.service == SHARD for one in servers)
        for one in servers:
            assert descends(one, infer, spans)
            assert (one.attributes["rpc.system"], one.attributes["net.transport"]) == ("grpc", "unix")
            assert one.attributes["rpc.service"] == "generate.v3.TextGenerationService"
    assert all(one.links == [(TRACE, infer.span_id)] for one in spans if one.name == "batch")


def chat(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3, **more}


SCRIPT: list[tuple[str, dict[str, Any], int, int]] = [
    # Path, body, status, generations that succeed.
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3}}, 200, 1),
    ("/generate", {"inputs": "a", "parameters": {"max_new_tokens": 3, "best_of": 2, "do_sample": True}}, 200, 2),
    ("/generate_stream", {"inputs": "a", "parameters": {"max_new_tokens": 3}}, 200, 1),
    ("/", {"inputs": "a", "parameters": {"max_new_tokens": 3}}, 200, 1),
    ("/v1/completions", {"model": "tgi", "prompt": ["a", "b"], "max_tokens": 3}, 200, 2),
    ("/v1/chat/completions", chat(), 200, 1),
    ("/v1/chat/completions", chat(stream=True), 200, 1),
    ("/v1/chat/completions", chat(n=2), 200, 2),
    ("/invocations", {"inputs": "a", "parameters": {"max_new_tokens": 3}}, 200, 1),
    ("/vertex", {"instances": [{"inputs": "a", "parameters": {"max_new_tokens": 3}}]}, 200, 1),
    ("/chat_tokenize", chat(), 200, 0),
    ("/generate", {"inputs": ""}, 422, 0),
    ("/generate", {"inputs": "a", "parameters": {"temperature": -1}}, 422, 0),
    ("/v1/chat/completions", chat(n=200), 400, 0),
]


def test_a_scripted_load_counts(client: httpx.Client) -> None:
    before = series(client)
    for path, body, status, _ in SCRIPT:
        assert client.post(path, json=body).status_code == status, (path, body)
    after = series(client)
    assert set(after) == set(before), "no series is added"

    def grown(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    num_generations = sum(number for *_, number in SCRIPT)
    assert grown("tgi_request_count") == len(SCRIPT)
    assert grown("tgi_request_success") == grown("tgi_request_duration_count") == num_generations
    assert grown("tgi_request_failure", err="validation") == 3
    for method in METHODS:
        calls = grown("tgi_batch_inference_count", method=method)
        assert calls == grown("tgi_batch_inference_success", method=method) > 0
        for name in ("inference", "forward", "decode", "filter"):
            assert grown(f"tgi_batch_{name}_duration_count", method=method) >= calls
    assert grown("tgi_batch_next_size_count") == grown("tgi_batch_inference_count", method="prefill")
    assert grown("tgi_batch_next_size_sum") == num_generations


def num_joined(client: httpx.Client) -> float:
    now = series(client)
    return sum(value(now, "tgi_batch_concat", reason=name) for name in ("backpressure", "wait_exceeded", "chunking"))


def test_the_other_failures_count(client: httpx.Client) -> None:
    before = series(client)
    body = {"inputs": "a", "parameters": {"max_new_tokens": 200, "ignore_eos": True}}
    statuses: list[int] = []
    deadline = time.monotonic() + 120
    while num_joined(client) == 0 or 429 not in statuses:  # two may join the first, if they come before it ends
        assert time.monotonic() < deadline, "nobody joins"
        with client.stream("POST", "/generate_stream", json=body) as answer, ThreadPoolExecutor(8) as threads:
            next(answer.iter_raw())
            statuses += threads.map(lambda _: client.post("/generate", json=body).status_code, range(8))
    assert set(statuses) == {200, 429}
    with client.stream("POST", "/generate_stream", json=body) as answer:
        next(answer.iter_raw())  # and away
    deadline = time.monotonic() + 120
    while value(series(client), "tgi_request_failure", err="dropped") == value(
        before, "tgi_request_failure", err="dropped"
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    after = series(client)
    overloaded = value(after, "tgi_request_failure", err="overloaded")
    assert overloaded - value(before, "tgi_request_failure", err="overloaded") == statuses.count(429)
    assert value(after, "tgi_batch_concat_duration_count", method="decode") > 0


def test_batches_of_several_are_linked_to_each(collector: Collector) -> None:
    def found(spans: list[Received]) -> bool:
        return any(span.name == "batch" and len(span.links) > 1 for span in spans)

    spans = collector.wait(found)
    shared = next(span for span in spans if span.name == "batch" and len(span.links) > 1)
    assert shared.parent_id == "" and int(shared.attributes["batch_size"]) == len(shared.links)
    linked = {span_id for _, span_id in shared.links}
    spans = collector.wait(lambda all_spans: linked <= {span.span_id for span in all_spans})
    assert {span.name for span in spans if span.span_id in linked} == {"infer"}


def test_the_log_is_json_with_the_fields_of_tgi(server: RunningServer) -> None:
    deadline = time.monotonic() + 120  # records go through the launcher
    while server.log().count('"message":"Success"') < sum(number for *_, number in SCRIPT) + 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    records = [json.loads(line) for line in server.log().rpartition("\n")[0].splitlines()]
    successes = [record for record in records if record.get("message") == "Success"]
    assert len(successes) >= 12
    for record in successes:
        assert {"timestamp", "level", "target", "filename", "line_number", "span", "spans"} <= set(record)
        span = record["span"]
        assert record["spans"] == [span]
        names = {"name", "parameters", "total_time", "validation_time", "queue_time", "inference_time", "seed"}
        assert names | {"time_per_token"} == set(span)
    assert {record["span"]["name"] for record in successes} == {
        "generate", "generate_stream", "compat_generate", "completions", "chat_completions", "sagemaker_compatibility",
        "vertex_compatibility",
    }  # fmt: skip
    refused = [record for record in records if str(record.get("message", "")).startswith("Refused: ")]
    assert {record["message"] for record in refused} == {
        "Refused: overloaded reason=overloaded",
        "Refused: validation reason=invalid_value field=n given=200 limit=3",
        "Refused: validation reason=invalid_value field=temperature given=-1 limit=0",
        "Refused: validation reason=prompt_empty field=inputs",
    }
    assert all(record["level"] == "ERROR" and record["request_id"] for record in refused)


def test_the_filter_holds_in_every_process(server: RunningServer) -> None:
    records = [json.loads(line) for line in server.log().rpartition("\n")[0].splitlines()]
    packages = {record["target"].partition(".")[0] for record in records if record["level"] == "INFO"}
    assert packages == {"router", "model_server"}, "the launcher itself is asked for warnings only"


@pytest.mark.long
def test_nothing_hangs_when_the_collector_is_gone(
    server: RunningServer, client: httpx.Client, collector: Collector
) -> None:
    collector.stop()
    for _ in range(3):
        assert client.post("/generate", json=SCRIPT[0][1]).status_code == 200
    assert server.is_healthy()
    assert server.stop() == 0
    assert "Traceback" not in server.log()
