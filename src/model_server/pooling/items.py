"""What one step of a pooled model is asked, and what it gives."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.uint32]


class Kind(enum.IntEnum):
    """As `Kind` of pooling.proto."""

    POOLED = 0
    TOKENS = 1
    SPARSE = 2
    SCORES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One text, or a pair of texts.

    second_from: where the second text begins; 0: there is none. prompt_tokens: how many tokens at the beginning are of
    a prompt. dimensions: how many numbers of the vector are kept; 0: all.
    """

    id: int
    input_ids: Ids
    second_from: int = 0
    prompt_tokens: int = 0
    kind: Kind = Kind.POOLED
    dimensions: int = 0
    normalize: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Numbers [rows, columns], or those at `indices` of a sparse vector; or why there are none."""

    id: int
    values: bytes = b""  # float32
    rows: int = 0
    columns: int = 0
    indices: tuple[int, ...] = ()
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Of one step, in the order of its items; times in nanoseconds."""

    results: tuple[Result, ...]
    forward_ns: int
    total_ns: int
    phases_ns: tuple[int, ...] = ()  # inputs, forward, pooling, wait
