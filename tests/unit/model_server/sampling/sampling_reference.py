"""The sampling rules once more, one row at a time, in plain Python and float64: what the sampler is held to.

Follows the formulas of TGI (`utils/logits_process.py`, `utils/tokens.py`) with true histories and clamped indexes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from model_server.sampling.parameters import SamplingParameters


@dataclass
class Warped:
    """`logprobs` of what is left, and how near the closest decision was to falling the other way."""

    logprobs: dict[int, float]
    margin: float = math.inf
    order: list[int] = field(default_factory=list)


def adjust(x: list[float], prompt: Sequence[int], generated: Sequence[int], p: SamplingParameters) -> list[float]:
    """Penalties and biases."""
    x = list(x)
    history = [*prompt, *generated]
    if p.repetition_penalty != 1.0:
        for i in set(history):
            x[i] = x[i] * p.repetition_penalty if x[i] < 0 else x[i] / p.repetition_penalty
    if p.frequency_penalty != 0.0:
        for i in set(history):
            x[i] -= p.frequency_penalty * history.count(i) / len(history)
    for i in set(generated):
        x[i] -= p.presence_penalty + p.absolute_frequency_penalty * list(generated).count(i)
    for i, bias in p.logit_bias:
        x[i] += bias
    return x


def softmax(x: Sequence[float]) -> list[float]:
    largest = max(x)
    e = [math.exp(v - largest) if v > -math.inf else 0.0 for v in x]
    total = math.fsum(e)
    return [v / total for v in e]


def warp(x: list[float], p: SamplingParameters) -> Warped:
    """Temperature, top-k, top-p, min-p, typical-p, log-softmax."""
    x = [v / p.temperature for v in x]
    width = len(x)
    margin = math.inf
    if p.top_k:
        threshold = sorted(x, reverse=True)[min(p.top_k, width) - 1]
        x = [v if v >= threshold else -math.inf for v in x]
    if p.top_p < 1.0:
        ascending = sorted(range(width), key=lambda i: x[i])  # stable: among equals the lower id goes first
        probabilities = softmax(x)
        cumulative = 0.0
        for i in ascending[:-1]:
            cumulative += probabilities[i]
            if probabilities[i] > 0:
                margin = min(margin, abs(cumulative - (1 - p.top_p)))
            if cumulative <= 1 - p.top_p:
                x[i] = -math.inf
    if p.min_p > 0.0:
        limit = max(x) + math.log(p.min_p)
        margin = min([margin, *(abs(v - limit) for v in x if max(x) > v > -math.inf)])
        x = [v if v >= limit else -math.inf for v in x]
    if p.typical_p < 1.0:
        probabilities = softmax(x)
        logs = [math.log(q) if q > 0 else -math.inf for q in probabilities]
        entropy = -math.fsum(q * log for q, log in zip(probabilities, logs, strict=True) if q > 0)
        distance = [abs(-log - entropy) for log in logs]
        order = sorted(range(width), key=lambda i: distance[i])
        cumulative, count = 0.0, 0
        for i in order:
            cumulative += probabilities[i]
            if probabilities[i] > 0:
                margin = min(margin, abs(cumulative - p.typical_p))
            count += cumulative < p.typical_p
        cut = distance[order[min(count, width - 1)]]
        margin = min(
            [margin, *(abs(d - cut) for i, d in enumerate(distance) if x[i] != x[order[min(count, width - 1)]])]
        )
        x = [v if d <= cut else -math.inf for v, d in zip(x, distance, strict=True)]
    probabilities = softmax(x)
    return Warped({i: math.log(q) for i, q in enumerate(probabilities) if x[i] > -math.inf and q > 0}, margin)


def choose(warped: Warped, uniform: float) -> tuple[int, float]:
    """The token at `uniform` of the cumulative distribution in the order of ids, and the distance to the next edge."""
    cumulative, edges, chosen = 0.0, [], None
    for i in sorted(warped.logprobs):
        cumulative += math.exp(warped.logprobs[i])
        edges.append(abs(cumulative - uniform))
        if chosen is None and cumulative > uniform:
            chosen = i
    return max(warped.logprobs) if chosen is None else chosen, min(edges)
