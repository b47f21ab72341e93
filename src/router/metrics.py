"""Values of the metrics, and Prometheus' text.

`count`, `observe` and `gauge` are in the token loop: two look-ups and an addition, on the event loop's thread.
Undeclared names raise KeyError, so requests add no series.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from router.declared_metrics import DECLARED, OTHER, POOLING, Declared, Scale

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_MOST_VALUES = 100
"""Of a label whose values are names that an operator gives."""


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

    def add(self, first: str) -> None:
        """Add a value of the first label."""
        for key in self.declared.keys_of(first):
            self.series.setdefault(key, _Histogram(len(self.edges)))


class _ValueFamily:
    __slots__ = ("declared", "series")

    def __init__(self, declared: Declared) -> None:
        self.declared = declared
        self.series: dict[tuple[str, ...], float] = dict.fromkeys(declared.keys, 0)

    def add(self, first: str) -> None:
        """Add a value of the first label."""
        for key in self.declared.keys_of(first):
            self.series.setdefault(key, 0)


class Metrics:
    """One router's series, from the start, with zeros, for rates and scaling."""

    def __init__(self, *, max_input_tokens: int = 1024, max_total_tokens: int = 2048, max_step_tokens: int = 1) -> None:
        self._start(DECLARED)
        self._set_scales({"seconds": _duration_edges(), "requests": range(1, 1025)})
        self.set_limits(
            max_input_tokens=max_input_tokens, max_total_tokens=max_total_tokens, max_step_tokens=max_step_tokens
        )

    def _start(self, declared: Mapping[str, Declared]) -> None:
        self._declared = declared
        self._values = {name: _ValueFamily(one) for name, one in declared.items() if one.kind in ("counter", "gauge")}
        self._values_of: dict[str, set[str]] = {}
        self._infos: dict[str, str] = {}
        self._followed: dict[str, Callable[[], Mapping[str, str | int] | None]] = {}
        self._followed_gauges: dict[str, Callable[[], Mapping[tuple[str, ...], float]]] = {}
        self._histograms: dict[str, _HistogramFamily] = {}

    def set_limits(self, *, max_input_tokens: int, max_total_tokens: int, max_step_tokens: int) -> None:
        """Set bucket edges by limits, dropping their values."""
        of_input, of_total = _hundredths(max_input_tokens), _hundredths(max_total_tokens)
        self._set_scales({"input": of_input, "total": of_total, "step": range(max_step_tokens + 1)})

    def _set_scales(self, edges: Mapping[Scale, Sequence[float]]) -> None:
        for name, declared in self._declared.items():
            if declared.scale is not None and declared.scale in edges:
                self._set_edges(name, edges[declared.scale])

    def _set_edges(self, name: str, edges: Sequence[float]) -> None:
        self._histograms[name] = _HistogramFamily(self._declared[name], edges)

    def add_values(self, label: str, names: Iterable[str]) -> None:
        """Give a first label's values series; where some share one called `other`, a hundred have their own."""
        known = self._values_of.setdefault(label, set())
        families: list[_ValueFamily | _HistogramFamily] = [*self._values.values(), *self._histograms.values()]
        of_label = [one for one in families if one.declared.labels and one.declared.labels[0][0] == label]
        most = _MOST_VALUES if any(OTHER in one.declared.labels[0][1] for one in of_label) else math.inf
        for name in names:
            if len(known) < most:
                known.add(name)
                for family in of_label:
                    family.add(name)

    def value_of(self, label: str, name: str) -> str:
        """Return the value under which something is counted: its name, or what all others share."""
        return name if name in self._values_of.get(label, ()) else OTHER

    def follow_keys(self, name: str, read: Callable[[], Mapping[str, int]]) -> None:
        """Read a gauge of each API key when the text is made."""

        def by_label() -> Mapping[tuple[str, ...], float]:
            found: Counter[tuple[str, ...]] = Counter()
            for key, value in read().items():
                if key:
                    found[self.value_of("key", key),] += value
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
        self._set_scales({"seconds": [0.00001 * 1.5**power for power in range(1, 36)]})
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
