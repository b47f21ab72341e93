"""A window's tokens on their way to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model_server.features.drafts.device.state import NO_DRAFT, RIGHT, Checked
from model_server.memory.transfer import download
from model_server.sampling.sampler import HostSampled
from model_server.sampling.top_tokens import TopTokens


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What became of one row."""

    got: int
    # Drafted tokens that were; `got`: its tokens.
    checked: int
    # Length of the next draft.
    drafted: int
    # Whether its draft's first token was, if it had one.
    first_right: bool | None


class WindowTokens:
    """`engine.steps.step.StepTokens` with the copy queued; `outcomes` by row after `to_host`."""

    def __init__(self, checked: Checked, length: int, top: list[TopTokens]) -> None:
        self.ids = checked.newest
        self.outcomes: list[RowOutcome] = []
        self._num_places = length + 1
        self._packed = download(checked.packed)
        self._top = top
        self._copied: torch.cuda.Event | None = None
        if checked.packed.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def is_over(self) -> bool:
        """Whether `to_host` would not wait."""
        return self._copied is None or bool(self._copied.query())  # type: ignore[no-untyped-call]

    def to_host(self) -> HostSampled:
        """Wait for the tokens; idle rows have none."""
        if self._copied is not None:
            self._copied.synchronize()
        places = self._num_places
        top: dict[int, list[tuple[int, float]]] = {}
        for part in self._top:
            top.update(part.to_host())
        ids: list[int] = []
        logprobs: list[float] = []
        tops: list[list[tuple[int, float]]] = []
        failed: list[bool] = []
        self.outcomes = []
        for row, values in enumerate(self._packed.tolist()):
            got, checked, following, first = map(int, values[3 * places :])
            failed.append(got > 0 and values[2 * places] != 0)
            ids += map(int, values[:got])
            logprobs += values[places : places + got]
            tops += [[] if failed[-1] else top.get(row * places + place, []) for place in range(got)]
            self.outcomes.append(RowOutcome(got, checked, following, None if first == NO_DRAFT else first == RIGHT))
        return HostSampled(ids, logprobs, tops, failed, [one.got for one in self.outcomes])
