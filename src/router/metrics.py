"""Every metric once, with TGI's bare names, and Prometheus' text.

`count`, `observe` and `gauge` are in the token loop: two look-ups and an addition, on the event loop's thread.
Undeclared names raise KeyError, so requests add no series.
"""

from __future__ import annotations

import itertools
import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from router.errors import Reason
from wire.step_phases import DRAFT_KINDS, OTHER_DRAFTS, PHASES, POOLING_PHASES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_METHODS = ("method", ("prefill", "decode"))
_DRAFT_KINDS = ("kind", (*DRAFT_KINDS, OTHER_DRAFTS))
_OTHER_ADAPTERS, _MOST_ADAPTERS = "other", 100
_OTHER_KEYS, _MOST_KEYS = "other", 100
KeyRefusal = Literal["concurrency", "model", "requests", "scope", "tokens"]
_Label = tuple[str, tuple[str, ...]]
"""A label and all values that it can have. They are written here, never taken from a request; names of adapters are
added when the shards have answered, names of API keys when their file has been read."""


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric, its unit, and its labels, two at most."""

    kind: Literal["counter", "gauge", "histogram", "info"]
    """info: one series, whose labels are facts that are known once the shards have answered. Its value is 1, or where
    they change the time at which it is read."""
    help: str
    unit: str
    labels: tuple[_Label, ...] = ()

    @property
    def keys(self) -> tuple[tuple[str, ...], ...]:
        """Return each series' label values."""
        return tuple(itertools.product(*(values for _, values in self.labels)))


def _counter(help: str, unit: str, *labels: _Label) -> Declared:
    return Declared("counter", help, unit, labels)


def _gauge(help: str, unit: str, *labels: _Label) -> Declared:
    return Declared("gauge", help, unit, labels)


def _histogram(help: str, unit: str, *labels: _Label) -> Declared:
    return Declared("histogram", help, unit, labels)


_KEY = ("key", (_OTHER_KEYS,))
OF_KEYS: dict[str, Declared] = {
    "tgi_key_requests": _counter("Requests of an API key that were let in", "requests", _KEY),
    "tgi_key_tokens": _counter(
        "Tokens of an API key; cached ones are of prompts, and counted there too",
        "tokens",
        _KEY,
        ("kind", ("prompt", "cached", "output")),
    ),
    "tgi_key_refused": _counter(
        "Requests of an API key that were refused, by reason", "requests", _KEY, ("reason", get_args(KeyRefusal))
    ),
}
"""Of the first hundred keys of a file; the others are counted together."""

_OF_BATCHES: dict[str, Declared] = {
    "tgi_batch_api_batches": _gauge(
        "Batches of the Batch API that are kept, by status",
        "batches",
        ("status", (
            "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled",
        )),
    ),
    "tgi_batch_api_requests": _counter(
        "Tries to answer requests of the Batch API, and requests that came too late",
        "requests",
        ("outcome", ("completed", "failed", "expired", "retried", "limited")),
    ),
    "tgi_batch_api_requests_waiting": _gauge("Requests of running batches without an answer", "requests"),
    "tgi_batch_api_stored_bytes": _gauge("Files of the Batch API", "bytes"),
    "tgi_batch_api_disk_errors": _counter("Failed writes of the Batch API", "writes"),
}  # fmt: skip
_OF_LOG: dict[str, Declared] = {
    "tgi_request_log_dropped": _counter("Lines that the request log has lost", "lines"),
}

DECLARED: dict[str, Declared] = {
    "tgi_request_count": _counter("Requests received", "requests"),
    "tgi_request_success": _counter("Generations finished", "generations"),
    "tgi_request_finished": _counter(
        "Generations ended, by reason",
        "generations",
        ("reason", ("length", "eos_token", "stop_sequence", "cancelled", "error")),
    ),
    "tgi_request_failure": _counter(
        "Requests that failed, by kind of error",
        "requests",
        ("err", ("validation", "overloaded", "generation", "incomplete", "dropped", "template")),
    ),
    "tgi_request_refused": _counter("Requests that were refused, by reason", "requests", ("reason", get_args(Reason))),
    "tgi_batch_inference_count": _counter("Calls that ran the model", "calls", _METHODS),
    "tgi_batch_inference_success": _counter("Calls that ran the model and succeeded", "calls", _METHODS),
    "tgi_batch_inference_failure": _counter("Calls that ran the model and failed", "calls", _METHODS),
    "tgi_batch_concat": _counter(
        "Prefills that joined a running batch", "batches", ("reason", ("backpressure", "wait_exceeded", "chunking"))
    ),
    "tgi_speculation_drafted_tokens": _counter("Tokens that were drafted", "tokens", _DRAFT_KINDS),
    "tgi_speculation_accepted_tokens": _counter("Drafted tokens that were right", "tokens", _DRAFT_KINDS),
    "tgi_encoder_cache_hits": _counter("Images of prompts that were already encoded", "images"),
    "tgi_encoder_cache_misses": _counter("Images of prompts that had to be encoded", "images"),
    "tgi_prefix_cache_query_tokens": _counter("Prompt tokens of finished generations", "tokens"),
    "tgi_prefix_cache_hit_tokens": _counter("Those of them that the prefix cache had", "tokens"),
    "tgi_request_preempted": _counter("Requests that gave up their KV blocks and began again", "requests"),
    "tgi_state_saves": _counter("States of layers that prompts saved", "states"),
    "tgi_state_restores": _counter("Prompts that continued from a saved state", "prompts"),
    "tgi_state_recomputed_tokens": _counter("Known prompt tokens computed again behind a saved state", "tokens"),
    "tgi_state_slots": _gauge("Slots for states of layers", "slots", ("use", ("live", "saved", "free"))),
    "tgi_lora_requests": _counter(
        "Requests for LoRA adapters, by the first hundred names", "requests", ("adapter", (_OTHER_ADAPTERS,))
    ),
    "tgi_lora_slot_loads": _counter("Copies of LoRA adapters into slots of a GPU", "adapters"),
    "tgi_lora_evictions": _counter("LoRA adapters that left the shards' memory for others", "adapters"),
    "tgi_lora_adapters": _gauge("LoRA adapters", "adapters", ("state", ("registered", "host", "slot"))),
    "tgi_lora_requests_waiting": _gauge("Requests whose LoRA adapter is being loaded", "requests"),
    "tgi_lora_requests_info": Declared("info", "LoRA adapters of running and of waiting requests", "adapters"),
    "tgi_lora_load_duration": _histogram("Loading of a LoRA adapter on all shards in seconds", "seconds"),
    "tgi_image_count": _counter("Images in requests", "images"),
    "tgi_queue_size": _gauge("Requests that wait for a batch", "requests"),
    "tgi_replicas": _gauge("Replicas of the model", "replicas", ("state", ("ready", "failed"))),
    "tgi_replica_queue_size": _gauge("Requests that wait for a batch of a replica", "requests", ("replica", ("0",))),
    "tgi_batch_current_size": _gauge("Requests in the running batch", "requests"),
    "tgi_batch_current_max_tokens": _gauge("Tokens that the running batch may grow to", "tokens"),
    "tgi_batch_max_total_tokens": _gauge("Token capacity of the server", "tokens"),
    "tgi_speculation_window": _gauge("Longest draft that the last step checked", "tokens"),
    "tgi_kv_blocks_free": _gauge("KV blocks that no request uses", "blocks"),
    "tgi_kv_blocks_cached": _gauge("Free KV blocks that hold the beginning of earlier requests", "blocks"),
    "tgi_kv_blocks_live": _gauge("KV blocks that requests hold", "blocks"),
    "tgi_kv_cache_usage": _gauge("Share of the KV blocks that requests hold, 0 to 1", "ratio"),
    "tgi_cache_config_info": Declared("info", "Tokens of a KV block and number of blocks", "blocks"),
    "tgi_image_encode_duration": _histogram("Encoding of the images of a step in seconds", "seconds"),
    "tgi_request_duration": _histogram("Whole request in seconds", "seconds"),
    "tgi_request_validation_duration": _histogram("From arrival to the queue in seconds", "seconds"),
    "tgi_request_queue_duration": _histogram("From the queue to a batch in seconds", "seconds"),
    "tgi_request_inference_duration": _histogram("From the batch to the last token in seconds", "seconds"),
    "tgi_request_mean_time_per_token_duration": _histogram("Inference time per generated token in seconds", "seconds"),
    "tgi_request_time_to_first_token_duration": _histogram("From arrival to the first token in seconds", "seconds"),
    "tgi_request_inter_token_duration": _histogram("Between two tokens of a request in seconds", "seconds"),
    "tgi_batch_inference_duration": _histogram("Call that ran the model in seconds", "seconds", _METHODS),
    "tgi_batch_forward_duration": _histogram("Forward pass in seconds", "seconds", _METHODS),
    "tgi_batch_decode_duration": _histogram("Choosing and decoding tokens in seconds", "seconds", _METHODS),
    "tgi_batch_phase_duration": _histogram("Part of a step on the shard in seconds", "seconds", ("phase", PHASES)),
    "tgi_batch_filter_duration": _histogram(
        "Delivering tokens and filtering the batch in seconds", "seconds", _METHODS
    ),
    # TGI's only value, also for what joins within a prefill.
    "tgi_batch_concat_duration": _histogram("Joining batches in seconds", "seconds", ("method", ("decode",))),
    "tgi_image_fetch_duration": _histogram("Fetching an image in seconds", "seconds"),
    "tgi_image_prepare_duration": _histogram("Preparing an image that was not known in seconds", "seconds"),
    "tgi_image_tokens": _histogram("Tokens of an image", "tokens"),
    "tgi_batch_next_size": _histogram("Requests in a new prefill", "requests"),
    "tgi_request_input_length": _histogram("Prompt tokens of a request", "tokens"),
    "tgi_request_generated_tokens": _histogram("Generated tokens of a request", "tokens"),
    "tgi_request_max_new_tokens": _histogram("Token budget that a request asked for, at most 1024", "tokens"),
    "tgi_request_skipped_tokens": _histogram("Speculated tokens accepted in one step of a request", "tokens"),
    **_OF_LOG,
    **_OF_BATCHES,
    **OF_KEYS,
    "tgi_key_queue_size": _gauge("Requests of an API key that wait for a batch", "requests", _KEY),
}


_REQUESTS = ("method", ("single", "batch"))
_FAILURES = ("batch_size", "dropped", "inference", "model_type", "overloaded", "tokenization", "validation")
POOLING: dict[str, Declared] = {
    "te_request_count": _counter("Requests received", "requests", _REQUESTS),
    "te_request_success": _counter("Requests answered", "requests", _REQUESTS),
    "te_request_failure": _counter("Requests that failed, by kind of error", "requests", ("err", _FAILURES)),
    "te_request_duration": _histogram("Whole request in seconds", "seconds"),
    "te_request_tokenization_duration": _histogram("Cutting a request into tokens in seconds", "seconds"),
    "te_request_queue_duration": _histogram("From the queue to the first step in seconds", "seconds"),
    "te_request_inference_duration": _histogram("From the first step to the last in seconds", "seconds"),
    "te_request_input_length": _histogram("Tokens of a text", "tokens"),
    "te_embed_count": _counter("Texts to be embedded", "texts"),
    "te_embed_success": _counter("Texts that were embedded", "texts"),
    "te_embed_duration": _histogram("Embedding of a request in seconds", "seconds"),
    "te_embed_tokenization_duration": _histogram("Its tokens in seconds", "seconds"),
    "te_embed_queue_duration": _histogram("Its wait in seconds", "seconds"),
    "te_embed_inference_duration": _histogram("Its steps in seconds", "seconds"),
    "te_predict_count": _counter("Texts or pairs to be scored", "texts"),
    "te_predict_success": _counter("Texts or pairs that were scored", "texts"),
    "te_predict_duration": _histogram("Scores of a request in seconds", "seconds"),
    "te_predict_tokenization_duration": _histogram("Its tokens in seconds", "seconds"),
    "te_predict_queue_duration": _histogram("Its wait in seconds", "seconds"),
    "te_predict_inference_duration": _histogram("Its steps in seconds", "seconds"),
    "te_batch_next_size": _histogram("Texts of a step", "texts"),
    "te_batch_next_tokens": _histogram("Tokens of a step", "tokens"),
    "te_queue_size": _gauge("Texts that wait for a step", "texts"),
    "tgi_queue_size": _gauge("Texts that wait for a step, for autoscalers", "texts"),
    "tgi_batch_phase_duration": _histogram(
        "Part of a step on the shard in seconds", "seconds", ("phase", POOLING_PHASES)
    ),
    **_OF_LOG,
    **_OF_BATCHES,
    **OF_KEYS,
}
"""Of a server whose task is embed, rerank or classify."""


def _duration_edges() -> list[float]:
    edges, value = [], 0.0001
    for _ in range(35):
        value *= 1.5
        edges.append(value)
    return edges


def _hundredths(limit: int) -> list[float]:
    return [limit * step / 100 for step in range(1, 101)]


class _Histogram:
    """One series: counts between edges, and the sum."""

    __slots__ = ("counts", "sum")

    def __init__(self, num_edges: int) -> None:
        self.counts = [0] * (num_edges + 1)
        self.sum = 0.0


class _HistogramFamily:
    __slots__ = ("declared", "edges", "series")

    def __init__(self, declared: Declared, edges: Sequence[float]) -> None:
        self.edges = edges
        self.declared = declared
        self.series = {key: _Histogram(len(edges)) for key in declared.keys}

    def add(self, key: tuple[str, ...]) -> None:
        self.series.setdefault(key, _Histogram(len(self.edges)))


class _ValueFamily:
    __slots__ = ("declared", "series")

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.series: dict[tuple[str, ...], float] = dict.fromkeys(declared.keys, 0)

    def add(self, key: tuple[str, ...]) -> None:
        self.series.setdefault(key, 0)


class Metrics:
    """One router's series, from the start, with zeros, for rates and scaling."""

    def __init__(self, *, max_input_tokens: int = 1024, max_total_tokens: int = 2048, speculate: int = 0) -> None:
        self._start(DECLARED)
        durations = _duration_edges()
        for name in DECLARED:
            if name.endswith("_duration"):
                self._set_edges(name, durations)
        self._set_edges("tgi_batch_next_size", range(1, 1025))
        self.set_limits(max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens, speculate=speculate)

    def _start(self, declared: Mapping[str, Declared]) -> None:
        self._declared = declared
        self._values = {name: _ValueFamily(one) for name, one in declared.items() if one.kind in ("counter", "gauge")}
        self._infos: dict[str, str] = {}
        self._followed: dict[str, Callable[[], Mapping[str, str | int] | None]] = {}
        self._followed_gauges: dict[str, Callable[[], Mapping[tuple[str, ...], float]]] = {}
        self._histograms: dict[str, _HistogramFamily] = {}

    def set_limits(self, *, max_input_tokens: int, max_total_tokens: int, speculate: int) -> None:
        """Set bucket edges by limits, dropping their values."""
        self._set_edges("tgi_request_input_length", _hundredths(max_input_tokens))
        self._set_edges("tgi_image_tokens", _hundredths(max_input_tokens))
        self._set_edges("tgi_request_generated_tokens", _hundredths(max_total_tokens))
        self._set_edges("tgi_request_max_new_tokens", _hundredths(max_total_tokens))
        self._set_edges("tgi_request_skipped_tokens", range(speculate + 2))

    def _set_edges(self, name: str, edges: Sequence[float]) -> None:
        self._histograms[name] = _HistogramFamily(self._declared[name], edges)

    def set_adapters(self, names: Sequence[str]) -> None:
        """Give the first hundred adapters series."""
        series = self._values["tgi_lora_requests"].series
        for name in names:
            if len(series) <= _MOST_ADAPTERS:
                series.setdefault((name,), 0)

    def adapter_label(self, name: str) -> str:
        """Return the label of an adapter's requests."""
        return name if (name,) in self._values["tgi_lora_requests"].series else _OTHER_ADAPTERS

    def add_label(self, label: str, value: str) -> None:
        """Give a label's new value series, where it is the first of a metric's labels."""
        families: list[_ValueFamily | _HistogramFamily] = [*self._values.values(), *self._histograms.values()]
        for family in families:
            if family.declared.labels and family.declared.labels[0][0] == label:
                for others in itertools.product(*(values for _, values in family.declared.labels[1:])):
                    family.add((value, *others))

    def set_keys(self, names: Sequence[str]) -> None:
        """Give the first hundred API keys series."""
        known = self._values["tgi_key_requests"].series
        for name in names:
            if len(known) > _MOST_KEYS:
                return
            self.add_label("key", name)

    def key_label(self, name: str) -> str:
        """Return the label of an API key's requests."""
        return name if (name,) in self._values["tgi_key_requests"].series else _OTHER_KEYS

    def follow_keys(self, name: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Read a gauge of each API key when the text is made."""

        def by_label() -> Mapping[tuple[str, ...], float]:
            found: Counter[tuple[str, ...]] = Counter()
            for key, value in read().items():
                if key:
                    found[self.key_label(key),] += value
            return found

        self.follow_gauge(name, by_label)

    def follow_gauge(self, name: str, read: Callable[[], Mapping[tuple[str, ...], float]]) -> None:
        """Read a gauge's series, by their label values, when the text is made; absent ones are zero."""
        self._followed_gauges[name] = read

    def _read_gauges(self) -> None:
        for name, read in self._followed_gauges.items():
            series = self._values[name].series
            series.update(dict.fromkeys(series, 0))
            series.update(read())

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Adds to a counter."""
        family = self._values[name]
        key = _key(family.declared, labels)
        if family.declared.kind != "counter":
            raise KeyError(name)
        family.series[key] += value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Sets a gauge."""
        family = self._values[name]
        if family.declared.kind != "gauge":
            raise KeyError(name)
        family.series[_key(family.declared, labels)] = value

    def inform(self, name: str, **facts: int) -> None:
        """Sets the labels of an info."""
        if self._declared[name].kind != "info":
            raise KeyError(name)
        self._infos[name] = _pairs(facts)

    def follow(self, name: str, read: Callable[[], Mapping[str, str | int] | None]) -> None:
        """Read an info's labels when the text is made, if any."""
        if self._declared[name].kind != "info":
            raise KeyError(name)
        self._followed[name] = read

    def observe(self, name: str, value: float, times: int = 1, **labels: str) -> None:
        """Add a value to a histogram, perhaps several times."""
        family = self._histograms[name]
        series = family.series[_key(family.declared, labels)]
        series.counts[bisect_left(family.edges, value)] += times
        series.sum += value * times

    def render(self) -> bytes:
        """The Prometheus text format."""
        self._read_gauges()
        lines: list[str] = []
        for name, declared in self._declared.items():
            kind = "gauge" if declared.kind == "info" else declared.kind
            lines += [f"# HELP {name} {declared.help}", f"# TYPE {name} {kind}"]
            if declared.kind == "info":
                lines += [f"{name}{{{self._infos[name]}}} 1"] if name in self._infos else []
                facts = self._followed[name]() if name in self._followed else None
                lines += [] if facts is None else [f"{name}{{{_pairs(facts)}}} {time.time():.3f}"]
            elif declared.kind == "histogram":
                lines += self._histogram_lines(name, self._histograms[name])
            else:
                values = self._values[name].series.items()
                lines += [f"{name}{_labels(declared, key)} {_number(value)}" for key, value in values]
            lines.append("")
        return ("\n".join(lines) + "\n").encode()

    def _histogram_lines(self, name: str, family: _HistogramFamily) -> Iterator[str]:
        for key, series in family.series.items():
            total = 0
            for edge, count in zip([*family.edges, math.inf], series.counts, strict=True):
                total += count
                bound = f'le="{_number(edge)}"'
                yield f"{name}_bucket{_labels(family.declared, key, bound)} {total}"
            yield f"{name}_sum{_labels(family.declared, key)} {_number(series.sum)}"
            yield f"{name}_count{_labels(family.declared, key)} {total}"


class PoolingMetrics(Metrics):
    """Metrics under text-embeddings-inference's names."""

    def __init__(self, max_input_tokens: int) -> None:
        self._start(POOLING)
        durations = [0.00001 * 1.5**power for power in range(1, 36)]
        for name, declared in POOLING.items():
            if declared.kind == "histogram":
                self._set_edges(name, durations)
        self._set_edges("te_request_input_length", [2**p for p in range(20) if 2**p <= max_input_tokens] or [1])
        self._set_edges("te_batch_next_size", [2**power for power in range(13)])
        self._set_edges("te_batch_next_tokens", [2**power for power in range(21)])


def _pairs(facts: Mapping[str, str | int]) -> str:
    return ",".join(f'{key}="{value}"' for key, value in facts.items())


def _key(declared: Declared, labels: dict[str, str]) -> tuple[str, ...]:
    if len(labels) != len(declared.labels):
        raise KeyError(f"the labels must be {[name for name, _ in declared.labels]}")
    return tuple([labels[name] for name, _ in declared.labels])


def _labels(declared: Declared, key: tuple[str, ...], *more: str) -> str:
    pairs = [f'{name}="{value}"' for (name, _), value in zip(declared.labels, key, strict=True)]
    return "{" + ",".join([*pairs, *more]) + "}" if pairs or more else ""


def _number(value: float) -> str:
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) else repr(float(value))
