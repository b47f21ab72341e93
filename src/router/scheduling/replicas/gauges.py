"""Metrics of one replica, in the router's: counters and histograms are shared, gauges are added up."""

from __future__ import annotations

import math

from router.metrics import Metrics

_LARGEST = ("tgi_speculation_window",)
_MEANS = ("tgi_kv_cache_usage",)


class Gauges:
    """What each replica has said last."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._said: dict[tuple[str, tuple[tuple[str, str], ...]], dict[int, float]] = {}

    def set(self, number: int, name: str, value: float, labels: dict[str, str]) -> None:
        """Note a replica's value, and set that of all."""
        said = self._said.setdefault((name, tuple(labels.items())), {})
        said[number] = value
        self._metrics.gauge(name, _of_all(name, said), **labels)
        if name == "tgi_queue_size":
            self._metrics.gauge("tgi_replica_queue_size", value, replica=str(number))

    def forget(self, number: int) -> None:
        """A replica has failed."""
        for (name, labels), said in self._said.items():
            if said.pop(number, None) is not None:
                self._metrics.gauge(name, _of_all(name, said), **dict(labels))


def _of_all(name: str, said: dict[int, float]) -> float:
    values = said.values()
    if name in _LARGEST:
        return max(values, default=0)
    return math.fsum(values) / max(len(said), 1) if name in _MEANS else math.fsum(values)


class ReplicaMetrics(Metrics):
    """Stands in for the router's metrics in a replica's scheduler."""

    def __init__(self, metrics: Metrics, gauges: Gauges, number: int) -> None:
        self._shared, self._gauges, self._number = metrics, gauges, number

    def count(self, name: str, value: float = 1, **labels: str) -> None:
        """Add to the router's counter."""
        self._shared.count(name, value, **labels)

    def observe(self, name: str, value: float, times: int = 1, **labels: str) -> None:
        """Add to the router's histogram."""
        self._shared.observe(name, value, times, **labels)

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set this replica's share of a gauge."""
        self._gauges.set(self._number, name, value, labels)

    def inform(self, name: str, **facts: int) -> None:
        """Set facts, which are those of every replica."""
        self._shared.inform(name, **facts)
