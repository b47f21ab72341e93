"""What one step of a pooled model is asked and gives."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]


class Kind(enum.IntEnum):
    """The kinds of pooling.proto."""

    POOLED = 0
    TOKENS = 1
    SPARSE = 2
    SCORES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One text, or a pair."""

    id: int
    input_ids: Ids
    # Where the second text begins; 0: there is none.
    second_from: int = 0
    # At the beginning, of a prompt.
    prompt_tokens: int = 0
    kind: Kind = Kind.POOLED
    # Numbers of the vector that are kept; 0: all.
    dimensions: int = 0
    normalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Numbers [rows, columns], those at `indices` of a sparse vector, or an error."""

    id: int
    values: bytes = b""  # float32
    rows: int = 0
    columns: int = 0
    indices: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Results in the order of items; nanoseconds."""

    results: tuple[Result, ...]
    forward_ns: int
    total_ns: int
    phases_ns: tuple[int, ...] = ()  # inputs, forward, pooling, wait
