"""Steps over texts, and their results, to and from pooling.v1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from wire.pooling.v1 import pooling_pb2 as pb

Kind = Literal["POOLED", "TOKENS", "SPARSE", "SCORES"]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TextItem:
    """One text of a step."""

    id: int
    ids: Sequence[int]
    second_from: int
    prompt_tokens: int
    kind: Kind
    dimensions: int
    normalize: bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """Values [columns], [rows, columns], or at `indices`, or an error."""

    values: Floats
    indices: Sequence[int] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """Numbers by item id; times of the slowest rank."""

    numbers: dict[int, Numbers]
    forward_s: float
    phases_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PooledCapacity:
    """The warm-up's longest text, width, and pooling."""

    max_input_tokens: int
    dimensions: int
    pooling: str


def run_to(items: Sequence[TextItem]) -> pb.RunRequest:
    return pb.RunRequest(
        items=[
            pb.Item(
                id=item.id,
                input_ids=np.array(item.ids, dtype="<u4").tobytes(),
                second_from=item.second_from,
                prompt_tokens=item.prompt_tokens,
                kind=item.kind,
                dimensions=item.dimensions,
                normalize=item.normalize,
            )
            for item in items
        ]
    )


def step_from(messages: Sequence[Any]) -> StepAnswer:
    """Join the ranks; the first has numbers."""
    phases = [message.phases_ns for message in messages]
    return StepAnswer(
        numbers={one.id: _numbers(one) for one in messages[0].results},
        forward_s=max(message.forward_ns for message in messages) / 1e9,
        phases_s=tuple(max(column) / 1e9 for column in zip(*phases, strict=True)),
    )


def _numbers(message: Any) -> Numbers:
    values = np.frombuffer(message.values, dtype="<f4")
    if message.HasField("error"):
        return Numbers(values, error=message.error)
    if message.rows > 1:
        values = values.reshape(message.rows, message.columns)
    return Numbers(values, tuple(message.indices))


def warm_up_to(max_batch_tokens: int, max_input_tokens: int | None) -> pb.WarmUpRequest:
    return pb.WarmUpRequest(max_batch_tokens=max_batch_tokens, max_input_tokens=max_input_tokens)


def capacity_from(messages: Sequence[Any]) -> PooledCapacity:
    """Return the smallest capacity."""
    return PooledCapacity(
        max_input_tokens=min(message.max_input_tokens for message in messages),
        dimensions=messages[0].dimensions,
        pooling=messages[0].pooling,
    )
