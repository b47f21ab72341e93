"""Every metric name once, with TGI's bare names (no `_total`), and the text that Prometheus reads.

`count`, `observe` and `gauge` are called in the token loop: a dictionary look-up and an addition each. A name or label
that is not declared here is a programmer's error and raises KeyError. Single-threaded: the event loop's thread only.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# Names of counters and gauges → (labels, help). Label values come from fixed sets, never from a request.
_COUNTERS: dict[str, tuple[tuple[str, ...], str]] = {
    "tgi_request_count": ((), "Requests received"),
    "tgi_request_success": ((), "Generations finished"),
    "tgi_request_failure": (("err",), "Requests that failed, by kind of error"),
    "tgi_batch_inference_count": (("method",), "Calls that ran the model"),
    "tgi_batch_inference_success": (("method",), "Calls that ran the model and succeeded"),
    "tgi_batch_inference_failure": (("method",), "Calls that ran the model and failed"),
    "tgi_batch_concat": (("reason",), "Prefills that joined a running batch"),
}
_GAUGES: dict[str, str] = {
    "tgi_queue_size": "Requests that wait for a batch",
    "tgi_batch_current_size": "Requests in the running batch",
    "tgi_batch_current_max_tokens": "Tokens that the running batch may grow to",
    "tgi_batch_max_total_tokens": "Token capacity of the server",
    "tgi_kv_blocks_free": "KV blocks that nobody holds",
    "tgi_kv_blocks_live": "KV blocks that requests hold",
}
_DURATIONS: dict[str, tuple[tuple[str, ...], str]] = {
    "tgi_request_duration": ((), "Whole request in seconds"),
    "tgi_request_validation_duration": ((), "From arrival to the queue in seconds"),
    "tgi_request_queue_duration": ((), "From the queue to a batch in seconds"),
    "tgi_request_inference_duration": ((), "From the batch to the last token in seconds"),
    "tgi_request_mean_time_per_token_duration": ((), "Inference time per generated token in seconds"),
    "tgi_request_time_to_first_token_duration": ((), "From arrival to the first token in seconds"),
    "tgi_request_inter_token_duration": ((), "Between two tokens of a request in seconds"),
    "tgi_batch_inference_duration": (("method",), "Call that ran the model in seconds"),
    "tgi_batch_forward_duration": (("method",), "Forward pass in seconds"),
    "tgi_batch_decode_duration": (("method",), "Choosing and decoding tokens in seconds"),
    "tgi_batch_filter_duration": (("method",), "Delivering tokens and filtering the batch in seconds"),
    "tgi_batch_concat_duration": (("method",), "Joining batches in seconds"),
}
_PER_INPUT = {"tgi_request_input_length": "Prompt tokens of a request"}
_PER_TOTAL = {
    "tgi_request_generated_tokens": "Generated tokens of a request",
    "tgi_request_max_new_tokens": "Token budget that a request asked for, at most 1024",
}
_NEXT_SIZE = {"tgi_batch_next_size": "Requests in a new prefill"}
_SKIPPED = {"tgi_request_skipped_tokens": "Speculated tokens accepted in one step of a request"}


def _duration_edges() -> list[float]:
    edges, value = [], 0.0001
    for _ in range(35):
        value *= 1.5
        edges.append(value)
    return edges


def _hundredths(limit: int) -> list[float]:
    return [limit * step / 100 for step in range(1, 101)]


class _Histogram:
    """One series: how many values fell between two neighbouring edges, and their sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, num_edges: int) -> None:
        self.counts = [0] * (num_edges + 1)
        self.sum = 0.0


class _HistogramFamily:
    __slots__ = ("edges", "help", "labels", "series")

    def __init__(self, edges: Sequence[float], labels: tuple[str, ...], help: str) -> None:
        self.edges = edges
        self.labels = labels
        self.help = help
        self.series: dict[tuple[str, ...], _Histogram] = {}


class _ValueFamily:
    __slots__ = ("help", "labels", "series")

    def __init__(self, labels: tuple[str, ...], help: str) -> None:
        self.labels = labels
        self.help = help
        self.series: dict[tuple[str, ...], float] = {}


class Metrics:
    """All series of one router. A series appears in the text after its first update."""

    def __init__(self, *, max_input_tokens: int = 1024, max_total_tokens: int = 2048, speculate: int = 0) -> None:
        self._counters = {name: _ValueFamily(labels, text) for name, (labels, text) in _COUNTERS.items()}
        self._gauges = {name: _ValueFamily((), text) for name, text in _GAUGES.items()}
        edges = _duration_edges()
        self._histograms = {name: _HistogramFamily(edges, labels, text) for name, (labels, text) in _DURATIONS.items()}
        for name, text in _NEXT_SIZE.items():
            self._histograms[name] = _HistogramFamily(range(1, 1025), (), text)
        self.set_limits(max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens, speculate=speculate)

    def set_limits(self, *, max_input_tokens: int, max_total_tokens: int, speculate: int) -> None:
        """Sets the bucket edges that depend on the limits; what these histograms held is dropped."""
        for name, text in _PER_INPUT.items():
            self._histograms[name] = _HistogramFamily(_hundredths(max_input_tokens), (), text)
        for name, text in _PER_TOTAL.items():
            self._histograms[name] = _HistogramFamily(_hundredths(max_total_tokens), (), text)
        for name, text in _SKIPPED.items():
            self._histograms[name] = _HistogramFamily(range(speculate + 2), (), text)

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        family = self._counters[name]
        key = _key(family.labels, labels) if labels or family.labels else ()
        family.series[key] = family.series.get(key, 0) + value

    def gauge(self, name: str, value: float) -> None:
        """Sets a gauge."""
        self._gauges[name].series[()] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Adds one value to a histogram."""
        family = self._histograms[name]
        key = _key(family.labels, labels) if labels or family.labels else ()
        series = family.series.get(key)
        if series is None:
            series = family.series[key] = _Histogram(len(family.edges))
        series.counts[bisect_left(family.edges, value)] += 1
        series.sum += value

    def names(self) -> list[str]:
        """Every declared name, for the documentation and its test."""
        return sorted([*self._counters, *self._gauges, *self._histograms])

    def render(self) -> bytes:
        """The Prometheus text format."""
        lines: list[str] = []
        for kind, families in (("counter", self._counters), ("gauge", self._gauges)):
            for name, family in families.items():
                if family.series:
                    lines += _head(name, kind, family.help)
                    lines += [f"{name}{_labels(family.labels, key)} {_number(v)}" for key, v in family.series.items()]
                    lines.append("")
        for name, histogram in self._histograms.items():
            if histogram.series:
                lines += _head(name, "histogram", histogram.help)
                for key, series in histogram.series.items():
                    lines += _histogram_lines(name, histogram, key, series)
                lines.append("")
        return ("\n".join(lines) + "\n").encode()


def _key(names: tuple[str, ...], labels: dict[str, str]) -> tuple[str, ...]:
    if len(labels) != len(names):
        raise KeyError(f"labels must be {names}")
    return tuple([labels[name] for name in names])


def _head(name: str, kind: str, help: str) -> list[str]:
    return [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]


def _labels(names: tuple[str, ...], values: tuple[str, ...], *more: str) -> str:
    pairs = [f'{name}="{value}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join([*pairs, *more]) + "}" if pairs or more else ""


def _histogram_lines(name: str, family: _HistogramFamily, key: tuple[str, ...], series: _Histogram) -> Iterator[str]:
    total = 0
    for edge, count in zip([*family.edges, math.inf], series.counts, strict=True):
        total += count
        bound = f'le="{_number(edge)}"'
        yield f"{name}_bucket{_labels(family.labels, key, bound)} {total}"
    yield f"{name}_sum{_labels(family.labels, key)} {_number(series.sum)}"
    yield f"{name}_count{_labels(family.labels, key)} {total}"


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
