"""What recurrent layers remember of each request (`RequestState`), in place while rows continue.

Rows computed together are one tensor, which a step of the same rows updates in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.runner.runner import RequestState


@dataclass(frozen=True, slots=True)
class Held:
    """One request's part of a tensor [rows, ...]."""

    rows: Tensor
    row: int


def gather(requests: Sequence[RequestState], key: tuple[int, str], like: Tensor) -> Tensor:
    """Return the requests' `key`, [len(requests), ...], to be updated in place; new ones like `like`."""
    held: list[Held | None] = [None if one.kept is None else one.kept.get(key) for one in requests]
    first = held[0]
    if first is not None and _are_whole(held, first.rows):
        return first.rows
    return torch.stack([like if one is None else one.rows[one.row] for one in held])


def _are_whole(held: Sequence[Held | None], rows: Tensor) -> bool:
    return len(rows) == len(held) and all(
        one is not None and one.rows is rows and one.row == row for row, one in enumerate(held)
    )


def put(requests: Sequence[RequestState], key: tuple[int, str], rows: Tensor) -> None:
    """Set the requests' `key` to `rows` [len(requests), ...]."""
    for row, one in enumerate(requests):
        if one.kept is None:
            one.kept = {}
        one.kept[key] = Held(rows, row)


def start_states(requests: Sequence[RequestState], starts: Sequence[int]) -> None:
    """Clear what requests have before their first token."""
    for one, start in zip(requests, starts, strict=True):
        if start == 0:
            one.kept = None
        elif one.kept is None:
            raise RuntimeError(f"the state of a request is gone, of which {start} tokens are said to be computed")
