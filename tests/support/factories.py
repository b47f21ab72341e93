"""Small objects for router tests: requests, limits, shard facts, and metrics that remember."""

from __future__ import annotations

from collections import Counter
from typing import Any

from support.fake_rows import first_id

from router.limits import ServingLimits, ShardInfo
from router.metrics import Metrics
from router.request import SamplingParameters, StoppingParameters, ValidRequest


def make_request(name: str = "a", input_length: int = 1, max_new_tokens: int = 1, **changes: Any) -> ValidRequest:
    """A prompt of `input_length` tokens; fake shards find `name` in the first of them."""
    values: dict[str, Any] = {
        "inputs": " ".join([name] + ["x"] * (input_length - 1)),
        "num_characters": len(name) + 2 * (input_length - 1),
        "input_ids": (first_id(name), *range(1, input_length)),
        "input_length": input_length,
        "truncate": input_length,
        "sampling": SamplingParameters(),
        "stopping": StoppingParameters(max_new_tokens=max_new_tokens),
    }
    return ValidRequest(**(values | changes))


def make_limits(**changes: Any) -> ServingLimits:
    values: dict[str, Any] = {
        "max_concurrent_requests": 128,
        "max_best_of": 2,
        "max_stop_sequences": 4,
        "max_top_n_tokens": 5,
        "max_client_batch_size": 4,
        "max_input_tokens": 4095,
        "max_total_tokens": 4096,
        "max_batch_prefill_tokens": 4096,
        "max_batch_total_tokens": 16000,
        "max_batch_size": None,
        "max_waiting_tokens": 20,
        "waiting_served_ratio": 1.2,
    }
    values |= changes
    return ServingLimits(**({"default_prefill_tokens": values["max_batch_prefill_tokens"]} | values))


def make_info(**changes: Any) -> ShardInfo:
    values: dict[str, Any] = {
        "dtype": "torch.float32",
        "device_type": "cpu",
        "speculate": 0,
        "chunks": False,
        "shares_prefixes": False,
        "attention_impl": "paged",
        "block_size": 1,
        "pipeline_depth": 2,
        "kv_cache_dtype": "torch.float32",
        "quantize": None,
    }
    return ShardInfo(**(values | changes))


class RecordingMetrics(Metrics):
    """Remembers what it was given; labelled names read `name{label}`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.observed: dict[str, list[float]] = {}
        self.gauges: dict[str, float] = {}

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        super().count(name, value, **labels)
        self.counts[_key(name, labels)] += int(value)

    def observe(self, name: str, value: float, times: int = 1, **labels: str) -> None:
        super().observe(name, value, times, **labels)
        self.observed.setdefault(_key(name, labels), []).extend([value] * times)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        super().gauge(name, value, **labels)
        self.gauges[_key(name, labels)] = value


def _key(name: str, labels: dict[str, str]) -> str:
    return name + ("{" + ",".join(labels.values()) + "}" if labels else "")
