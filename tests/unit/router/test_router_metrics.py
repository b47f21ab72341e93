"""Names, types, labels, buckets and text of the metrics; what TGI's dashboard asks of them; what clients cannot do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from router_fakes import Router, failing, says

from router import metrics
from router.config import RouterConfig
from router.declared_metrics import DECLARED, POOLING, KeyRefusal
from router.errors import IncompleteError, Reason
from router.front.metrics import FRONT
from router.metrics import Metrics

MakeRouter = Callable[..., Router]

DURATION, TOKENS, NEXT_SIZE, SKIPPED = "duration", "hundredths", "1..1024", "skipped"
ERRORS = {"err": {"validation", "overloaded", "generation", "incomplete", "dropped", "template"}}
METHODS = {"method": {"prefill", "decode"}}
REFUSALS = set(get_args(Reason))
REASONS = {"reason": {"backpressure", "wait_exceeded", "chunking"}}
# Name, type, label and its values, buckets: as TGI 3.3 has them, but for the histogram of skipped tokens.
OF_TGI: list[tuple[str, str, dict[str, set[str]], str]] = [
    ("tgi_request_count", "counter", {}, ""),
    ("tgi_request_success", "counter", {}, ""),
    ("tgi_request_failure", "counter", ERRORS, ""),
    ("tgi_request_duration", "histogram", {}, DURATION),
    ("tgi_request_validation_duration", "histogram", {}, DURATION),
    ("tgi_request_queue_duration", "histogram", {}, DURATION),
    ("tgi_request_inference_duration", "histogram", {}, DURATION),
    ("tgi_request_mean_time_per_token_duration", "histogram", {}, DURATION),
    ("tgi_request_generated_tokens", "histogram", {}, TOKENS),
    ("tgi_request_input_length", "histogram", {}, TOKENS),
    ("tgi_request_max_new_tokens", "histogram", {}, TOKENS),
    ("tgi_request_skipped_tokens", "histogram", {}, SKIPPED),
    ("tgi_queue_size", "gauge", {}, ""),
    ("tgi_batch_next_size", "histogram", {}, NEXT_SIZE),
    ("tgi_batch_current_size", "gauge", {}, ""),
    ("tgi_batch_current_max_tokens", "gauge", {}, ""),
    ("tgi_batch_inference_count", "counter", METHODS, ""),
    ("tgi_batch_inference_success", "counter", METHODS, ""),
    ("tgi_batch_inference_failure", "counter", METHODS, ""),
    ("tgi_batch_inference_duration", "histogram", METHODS, DURATION),
    ("tgi_batch_forward_duration", "histogram", METHODS, DURATION),
    ("tgi_batch_decode_duration", "histogram", METHODS, DURATION),
    ("tgi_batch_filter_duration", "histogram", METHODS, DURATION),
    ("tgi_batch_concat", "counter", REASONS, ""),
    ("tgi_batch_concat_duration", "histogram", {"method": {"decode"}}, DURATION),
    ("tgi_batch_max_total_tokens", "gauge", {}, ""),
]
OURS: list[tuple[str, str, dict[str, set[str]], str]] = [
    ("tgi_request_time_to_first_token_duration", "histogram", {}, DURATION),
    ("tgi_request_inter_token_duration", "histogram", {}, DURATION),
    (
        "tgi_batch_phase_duration",
        "histogram",
        {"phase": {"idle", "inputs", "forward", "sampling", "wait", "text", "drafting"}},
        DURATION,
    ),
    ("tgi_request_preempted", "counter", {}, ""),
    ("tgi_replicas", "gauge", {"state": {"ready", "failed"}}, ""),
    ("tgi_replica_queue_size", "gauge", {"replica": {"0"}}, ""),
    (
        "tgi_batch_api_batches",
        "gauge",
        {
            "status": {
                "validating",
                "failed",
                "in_progress",
                "finalizing",
                "completed",
                "expired",
                "cancelling",
                "cancelled",
            },
        },
        "",
    ),
    (
        "tgi_batch_api_requests",
        "counter",
        {"outcome": {"completed", "failed", "expired", "retried", "limited"}},
        "",
    ),
    ("tgi_batch_api_requests_waiting", "gauge", {}, ""),
    ("tgi_batch_api_stored_bytes", "gauge", {}, ""),
    ("tgi_batch_api_disk_errors", "counter", {}, ""),
    ("tgi_prefix_cache_query_tokens", "counter", {}, ""),
    ("tgi_prefix_cache_hit_tokens", "counter", {}, ""),
    (
        "tgi_request_finished",
        "counter",
        {"reason": {"length", "eos_token", "stop_sequence", "cancelled", "error"}},
        "",
    ),
    ("tgi_request_refused", "counter", {"reason": REFUSALS}, ""),
    ("tgi_state_saves", "counter", {}, ""),
    ("tgi_state_restores", "counter", {}, ""),
    ("tgi_state_recomputed_tokens", "counter", {}, ""),
    ("tgi_state_slots", "gauge", {"use": {"live", "saved", "free"}}, ""),
    ("tgi_lora_requests", "counter", {"adapter": {"other"}}, ""),
    ("tgi_key_requests", "counter", {"key": {"other"}}, ""),
    ("tgi_key_tokens", "counter", {"key": {"other"}, "kind": {"prompt", "cached", "output"}}, ""),
    ("tgi_key_queue_size", "gauge", {"key": {"other"}}, ""),
    ("tgi_key_refused", "counter", {"key": {"other"}, "reason": set(get_args(KeyRefusal))}, ""),
    ("tgi_encoder_cache_hits", "counter", {}, ""),
    ("tgi_encoder_cache_misses", "counter", {}, ""),
    ("tgi_image_encode_duration", "histogram", {}, DURATION),
    ("tgi_request_log_dropped", "counter", {}, ""),
    ("tgi_lora_slot_loads", "counter", {}, ""),
    ("tgi_lora_evictions", "counter", {}, ""),
    ("tgi_lora_adapters", "gauge", {"state": {"registered", "host", "slot"}}, ""),
    ("tgi_lora_requests_waiting", "gauge", {}, ""),
    ("tgi_lora_requests_info", "gauge", {}, ""),
    ("tgi_lora_load_duration", "histogram", {}, ""),
    ("tgi_speculation_drafted_tokens", "counter", {"kind": {"lookup", "grammar", "prediction", "model", "other"}}, ""),
    ("tgi_speculation_accepted_tokens", "counter", {"kind": {"lookup", "grammar", "prediction", "model", "other"}}, ""),
    ("tgi_image_count", "counter", {}, ""),
    ("tgi_image_fetch_duration", "histogram", {}, DURATION),
    ("tgi_image_prepare_duration", "histogram", {}, DURATION),
    ("tgi_image_tokens", "histogram", {}, ""),
    ("tgi_speculation_window", "gauge", {}, ""),
    ("tgi_kv_blocks_free", "gauge", {}, ""),
    ("tgi_kv_blocks_cached", "gauge", {}, ""),
    ("tgi_kv_blocks_live", "gauge", {}, ""),
    ("tgi_kv_cache_usage", "gauge", {}, ""),
    ("tgi_cache_config_info", "gauge", {}, ""),
]


def families(text: str) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(text)}


def at_the_start(limits: int = 2000) -> str:
    """The text before anything was counted."""
    return Metrics(max_input_tokens=limits // 2, max_total_tokens=limits, max_step_tokens=3).render().decode()


def edges(family: Metric) -> list[float]:
    first = {key: value for key, value in family.samples[0].labels.items() if key != "le"}
    samples = [one for one in family.samples if one.name.endswith("_bucket") and first.items() <= one.labels.items()]
    return [float(sample.labels["le"]) for sample in samples]


@pytest.mark.parametrize(("name", "kind", "labels", "buckets"), OF_TGI + OURS, ids=[row[0] for row in OF_TGI + OURS])
def test_every_series(name: str, kind: str, labels: dict[str, set[str]], buckets: str) -> None:
    family = families(at_the_start())[name]
    assert family.type == kind
    found: dict[str, set[str]] = {}
    for sample in family.samples:
        # The parser gives samples of counters OpenMetrics' ending; the text has the bare name, see below.
        endings = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[kind]
        assert sample.name in [name + ending for ending in endings]
        for key, value in sample.labels.items():
            if key != "le":
                found.setdefault(key, set()).add(value)
    assert found == labels
    if not buckets:
        return
    *found_edges, last = edges(family)
    assert last == float("inf")
    limit = 10 if name == "tgi_request_input_length" else 20
    expected = {
        DURATION: [0.0001 * 1.5**k for k in range(1, 36)],
        TOKENS: [limit * k for k in range(1, 101)],
        NEXT_SIZE: list(range(1, 1025)),
        SKIPPED: [0, 1, 2, 3],
    }
    assert found_edges == pytest.approx(expected[buckets])


def test_nothing_else_is_shown() -> None:
    assert set(families(at_the_start())) == {name for name, *_ in OF_TGI + OURS} == set(DECLARED)
    assert not re.search(r"_(total|created)[ {]", at_the_start())


def test_every_value_begins_at_zero() -> None:
    for family in families(at_the_start()).values():
        if DECLARED[family.name].kind == "info":
            assert not family.samples, "not known before the shards have answered"
            continue
        assert family.samples and all(sample.value == 0 for sample in family.samples), family.name


def test_the_text() -> None:
    made = Metrics()
    made.count("tgi_request_count")
    made.count("tgi_request_count", 2)
    made.count("tgi_request_failure", err="dropped")
    made.gauge("tgi_queue_size", 3)
    text = made.render().decode()
    assert text.startswith("# HELP tgi_request_count Requests received\n# TYPE tgi_request_count counter\n")
    assert "\ntgi_request_count 3\n\n# HELP tgi_request_success Generations finished\n" in text
    assert '\ntgi_request_failure{err="dropped"} 1\n' in text and '\ntgi_request_failure{err="template"} 0\n' in text
    assert "\n# TYPE tgi_queue_size gauge\ntgi_queue_size 3\n\n" in text
    assert "\ntgi_batch_current_size 0\n" in text


def test_a_histogram_counts_upwards() -> None:
    made = Metrics()
    for seconds in (0.0, 0.00015, 0.001, 1e9):
        made.observe("tgi_batch_forward_duration", seconds, method="decode")
    family = families(made.render().decode())["tgi_batch_forward_duration"]
    samples = [sample for sample in family.samples if sample.labels["method"] == "decode"]
    counts = [sample.value for sample in samples if sample.name.endswith("_bucket")]
    assert counts == sorted(counts) and counts[-1] == 4 and counts[-2] == 3 and counts[0] == 2
    by_name = {sample.name: sample.value for sample in samples}
    assert by_name["tgi_batch_forward_duration_count"] == 4
    assert by_name["tgi_batch_forward_duration_sum"] == pytest.approx(1e9 + 0.00115)


def test_one_value_several_times() -> None:
    made = Metrics(max_step_tokens=2)
    made.observe("tgi_request_skipped_tokens", 0, 5)
    made.observe("tgi_request_skipped_tokens", 2, 2)
    text = made.render().decode()
    assert 'tgi_request_skipped_tokens_bucket{le="0"} 5\n' in text
    assert 'tgi_request_skipped_tokens_bucket{le="2"} 7\n' in text
    assert "tgi_request_skipped_tokens_sum 4\ntgi_request_skipped_tokens_count 7\n" in text


def test_facts_are_labels() -> None:
    made = Metrics()
    made.inform("tgi_cache_config_info", block_size=16, num_gpu_blocks=999)
    (sample,) = families(made.render().decode())["tgi_cache_config_info"].samples
    assert (sample.value, sample.labels) == (1, {"block_size": "16", "num_gpu_blocks": "999"})


def test_facts_that_change_are_read_with_the_text() -> None:
    made = Metrics()
    facts: dict[str, str | int] | None = None
    made.follow("tgi_lora_requests_info", lambda: facts)
    assert not families(made.render().decode())["tgi_lora_requests_info"].samples
    facts = {"max_lora": 4, "running_lora_adapters": "a,b"}
    before = time.time()
    (sample,) = families(made.render().decode())["tgi_lora_requests_info"].samples
    assert sample.labels == {"max_lora": "4", "running_lora_adapters": "a,b"} and sample.value >= before - 0.001


def test_what_is_not_declared_is_an_error() -> None:
    made = Metrics()
    for wrong in (
        lambda: made.count("tgi_unknown"),
        lambda: made.count("tgi_request_count", err="x"),
        lambda: made.count("tgi_request_failure"),
        lambda: made.count("tgi_request_failure", err="a client's text"),
        lambda: made.count("tgi_queue_size"),
        lambda: made.observe("tgi_batch_forward_duration", 1, phase="decode"),
        lambda: made.observe("tgi_batch_forward_duration", 1, method="x"),
        lambda: made.gauge("tgi_request_count", 1),
        lambda: made.inform("tgi_queue_size", size=1),
        lambda: made.follow("tgi_queue_size", lambda: None),
    ):
        before = made.render()
        with pytest.raises(KeyError):
            wrong()
        assert made.render() == before


def test_the_first_hundred_adapters_have_series_of_their_own() -> None:
    made = Metrics()
    made.add_values("adapter", [f"a{i}" for i in range(102)])
    for name in ("a99", "a100", "a101"):
        made.count("tgi_lora_requests", adapter=made.value_of("adapter", name))
    samples = families(made.render().decode())["tgi_lora_requests"].samples
    assert {s.labels["adapter"] for s in samples} == {"other", *(f"a{i}" for i in range(100))}
    assert {s.labels["adapter"]: s.value for s in samples if s.value} == {"a99": 1, "other": 2}
    with pytest.raises(KeyError):
        made.count("tgi_lora_requests", adapter="a100")


def test_what_is_written_is_declared_and_the_other_way_round() -> None:
    """A name that is missing here would only show when its event comes, and end the scheduler."""
    package = Path(metrics.__file__).parent
    files = [path for path in package.rglob("*.py") if path.name != "metrics.py" or path.parent.name == "front"]
    written = "".join(path.read_text() for path in files)
    assert set(re.findall(r'"(tgi_[a-z_]+)"', written)) - {"tgi_version"} == {*DECLARED, *FRONT}
    for label, values in (ERRORS | METHODS | {"reason": REASONS["reason"] | REFUSALS}).items():
        assert set(re.findall(rf'\b{label}="([a-z_]+)"', written)) <= values


def test_the_documentation_lists_them_all() -> None:
    """docs/observability.md has one row for each metric; its columns are what the code declares."""
    text = (Path(__file__).parents[3] / "docs" / "observability.md").read_text()
    rows = re.findall(r"^\| `(tgi_\w+)` \| (\w+) \| ([^|]*) \| (\w+) \| [^|]+ \|$", text, re.M)
    expected = []
    for name, one in (FRONT | DECLARED).items():
        label = "; ".join(f"{label}: {', '.join(values or ['the names'])}" for label, values in one.labels) or "–"
        expected.append((name, one.kind, label, one.unit))
    assert sorted(rows) == sorted(expected)


CHAT = {"messages": [{"role": "user", "content": "x"}]}
ONE_EACH: list[tuple[str, Any]] = [
    ("/generate", {"inputs": "x"}),
    ("/generate", {"inputs": "x", "parameters": {"best_of": 2, "do_sample": True}}),
    ("/generate_stream", {"inputs": "x"}),
    ("/", {"inputs": "x"}),
    ("/v1/completions", {"model": "tgi", "prompt": ["x", "y"]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"n": 2}),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/chat_tokenize", CHAT),
    ("/invocations", {"inputs": "x"}),
    ("/invocations", CHAT),
    ("/vertex", {"instances": [{"inputs": "x"}, {"inputs": "y"}]}),
    ("/generate", {"inputs": ""}),
    ("/v1/chat/completions", CHAT | {"temperature": -1}),
]


@pytest.mark.parametrize(("path", "body"), ONE_EACH)
async def test_a_request_counts_once(make_router: MakeRouter, path: str, body: Any) -> None:
    router = make_router(templates={"default": "{{ messages[0].content }}"})
    await router.post(path, body)
    assert families((await router.get("/metrics")).text)["tgi_request_count"].samples[0].value == 1


REFUSED: list[tuple[str, Any]] = [
    ("/generate", {"inputs": 7}),
    ("/generate", b"{"),
    ("/generate", b'{"inputs": "' + b"x" * 5000 + b'"}'),
    ("/v1/chat/completions", CHAT | {"tools": 1}),
    ("/v1/responses", {"input": 7}),
    ("/v1/responses", {"input": "x", "background": True}),
    ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
    ("/v1/responses", {"input": "x", "temperature": -1}),
    ("/v1/responses/input_tokens", {"input": "x", "tool_choice": {"type": "web_search"}}),
    ("/v1/messages", {"messages": CHAT["messages"]}),
    ("/v1/messages", {"messages": CHAT["messages"], "max_tokens": 0}),
    ("/v1/messages/count_tokens", b"x" * 5000),
    ("/invocations", {}),
    ("/vertex", {"instances": []}),
    ("/v2/models/m/versions/1/infer", {"inputs": 1}),
]


@pytest.mark.parametrize("content_type", ["application/json", "text/plain"])
@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_a_refusal_is_one_request_and_one_failure(
    make_router: MakeRouter, path: str, body: Any, content_type: str
) -> None:
    """Whether its type, its size, its shape or what it says is wrong."""
    config = RouterConfig(tokenizer_name="m", kserve_api=True, payload_limit=4000)
    router = make_router(config=config, templates={"default": "{{ messages[0].content }}"})
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    answer = await router.request("POST", path, content=raw, headers={"content-type": content_type})
    assert 400 <= answer.status_code < 500, answer.text
    found = families((await router.get("/metrics")).text)
    for name in ("tgi_request_count", "tgi_request_failure", "tgi_request_refused"):
        assert sum(sample.value for sample in found[name].samples) == 1, name


async def test_methods_and_content_type(router: Router) -> None:
    for method in ("GET", "HEAD"):
        answer = await router.request(method, "/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert (await router.request("POST", "/metrics")).status_code == 405


async def test_no_client_can_add_a_series(make_router: MakeRouter) -> None:
    """Hostile text in every place; the set of series stays the declared one."""
    marks = ['x"} 1\nevil{a="b', "\u2028\x00", "é" * 500, "../../metrics", '{err="pwned"}']
    failure = failing(" a", error=IncompleteError())
    router = make_router(lambda request: list(failure) if "é" in request.inputs else says(" a"))

    def series(text: str) -> set[str]:
        return {line.rpartition(" ")[0] for line in text.splitlines() if line and not line.startswith("#")}

    before = series((await router.get("/metrics")).text)
    for mark in marks:
        bodies: list[tuple[str, Any]] = [
            ("/generate", {"inputs": mark, "parameters": {"stop": [mark], "adapter_id": mark}}),
            ("/generate", {"inputs": mark}),
            ("/generate", {"inputs": mark, mark: mark}),
            ("/generate", {"inputs": "x", "parameters": {"grammar": {"type": "regex", "value": mark}}}),
            ("/v1/chat/completions", {"model": mark, "messages": [{"role": mark, "content": mark}], "user": mark}),
            ("/v1/completions", {"model": mark, "prompt": mark, "suffix": mark}),
            ("/invocations", {mark: mark}),
            ("/vertex", {"instances": [{"inputs": mark}]}),
            ("/nowhere", {}),
        ]
        for path, body in bodies:
            await router.post(path, body, x_request_id='evil-"{}', traceparent="00-zz-evil", user_agent="evil{}")
        await router.request("BREW", "/generate")
    text = (await router.get("/metrics")).text
    assert series(text) == before
    assert families(text)["tgi_request_count"].samples[0].value >= len(marks)


def test_durations_alone_have_the_edges_of_durations() -> None:
    for name, declared in {**DECLARED, **POOLING}.items():
        assert (declared.scale == "seconds") == (declared.kind == "histogram" and declared.unit == "seconds"), name
