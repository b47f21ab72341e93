"""Names, buckets and text of the metrics."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from router import metrics
from router.metrics import Metrics

TGI_DASHBOARD = shlex.split(
    "tgi_request_count tgi_request_success tgi_request_failure tgi_request_duration tgi_request_queue_duration "
    "tgi_request_mean_time_per_token_duration tgi_request_generated_tokens tgi_request_input_length "
    "tgi_request_skipped_tokens tgi_batch_inference_duration tgi_batch_forward_duration tgi_batch_decode_duration "
    "tgi_batch_filter_duration tgi_batch_concat_duration tgi_batch_concat tgi_queue_size tgi_batch_current_size "
    "tgi_batch_current_max_tokens tgi_request_validation_duration tgi_request_inference_duration "
    "tgi_request_max_new_tokens tgi_batch_next_size tgi_batch_inference_count tgi_batch_inference_success "
    "tgi_batch_inference_failure tgi_batch_max_total_tokens"
)


def test_every_name_of_tgi_is_there() -> None:
    assert set(TGI_DASHBOARD) <= set(Metrics().names())


def test_nothing_shows_before_its_first_update() -> None:
    assert Metrics().render().strip() == b""


def test_the_text() -> None:
    metrics = Metrics()
    metrics.count("tgi_request_count")
    metrics.count("tgi_request_count", 2)
    metrics.count("tgi_request_failure", err="dropped")
    metrics.gauge("tgi_queue_size", 3)
    lines = metrics.render().decode().splitlines()
    assert lines == [
        "# HELP tgi_request_count Requests received",
        "# TYPE tgi_request_count counter",
        "tgi_request_count 3",
        "",
        "# HELP tgi_request_failure Requests that failed, by kind of error",
        "# TYPE tgi_request_failure counter",
        'tgi_request_failure{err="dropped"} 1',
        "",
        "# HELP tgi_queue_size Requests that wait for a batch",
        "# TYPE tgi_queue_size gauge",
        "tgi_queue_size 3",
        "",
    ]


def test_the_buckets_of_tgi() -> None:
    metrics = Metrics(max_input_tokens=1000, max_total_tokens=2000, speculate=2)
    for name in ("tgi_request_duration", "tgi_request_input_length", "tgi_request_generated_tokens"):
        metrics.observe(name, 1)
    metrics.observe("tgi_batch_next_size", 3)
    metrics.observe("tgi_request_skipped_tokens", 0)
    families = {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}

    def edges(name: str) -> list[float]:
        samples = [sample for sample in families[name].samples if sample.name.endswith("_bucket")]
        return [float(sample.labels["le"]) for sample in samples]

    durations = edges("tgi_request_duration")
    assert len(durations) == 36 and durations[-1] == float("inf")
    assert durations[:-1] == pytest.approx([0.0001 * 1.5**k for k in range(1, 36)])
    assert edges("tgi_request_input_length")[:-1] == pytest.approx([10 * k for k in range(1, 101)])
    assert edges("tgi_request_generated_tokens")[:-1] == pytest.approx([20 * k for k in range(1, 101)])
    assert edges("tgi_batch_next_size")[:-1] == list(range(1, 1025))
    assert edges("tgi_request_skipped_tokens")[:-1] == [0, 1, 2, 3]


def test_a_histogram_counts_upwards() -> None:
    metrics = Metrics()
    for seconds in (0.0, 0.00015, 0.001, 1e9):
        metrics.observe("tgi_batch_forward_duration", seconds, method="decode")
    (family,) = text_string_to_metric_families(metrics.render().decode())
    counts = [sample.value for sample in family.samples if sample.name.endswith("_bucket")]
    assert counts == sorted(counts) and counts[-1] == 4 and counts[-2] == 3 and counts[0] == 2
    assert all(sample.labels["method"] == "decode" for sample in family.samples)
    by_name = {sample.name: sample.value for sample in family.samples}
    assert by_name["tgi_batch_forward_duration_count"] == 4
    assert by_name["tgi_batch_forward_duration_sum"] == pytest.approx(1e9 + 0.00115)


def test_what_is_not_declared_is_an_error() -> None:
    metrics = Metrics()
    with pytest.raises(KeyError):
        metrics.count("tgi_unknown")
    with pytest.raises(KeyError):
        metrics.count("tgi_request_count", err="x")
    with pytest.raises(KeyError):
        metrics.count("tgi_request_failure")
    with pytest.raises(KeyError):
        metrics.observe("tgi_batch_forward_duration", 1, phase="x")
    with pytest.raises(KeyError):
        metrics.gauge("tgi_request_count", 1)


def test_no_name_is_declared_that_nobody_writes() -> None:
    package = Path(metrics.__file__).parent
    written = "".join(path.read_text() for path in package.rglob("*.py") if path.name != "metrics.py")
    assert [name for name in Metrics().names() if f'"{name}"' not in written] == []
