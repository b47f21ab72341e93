"""The tokens that a batch sampled last, perhaps unseen by the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from model_server.batch.sequence import Sequence
from model_server.batch.tables import positions_of


@dataclass(frozen=True, slots=True)
class NewestTokens:
    """The newest tokens of some rows, on the device."""

    rows: list[Sequence]
    ids: Tensor  # [num_rows] int64


def places_of(rows: list[Sequence], newest: NewestTokens | None) -> npt.NDArray[np.int64]:
    """Find `rows` with unseen last tokens in `newest.ids`."""
    assert newest is not None, "the host has not seen a row's last token, but none was sampled"
    places = positions_of(rows, {id(s): i for i, s in enumerate(newest.rows)})
    assert places.min() >= 0, "the host has not seen a row's last token, but it was not sampled last"
    return places
