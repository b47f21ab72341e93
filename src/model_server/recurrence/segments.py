"""Where the tokens of one forward are in their sequences, for layers that read the tokens before each.

All of it is computed on the device from the device's own lengths, so that a captured step does so, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.runner.runner import RequestState


@dataclass(frozen=True, slots=True)
class ConvolutionPlan:
    """The inputs that a layer of a causal convolution reads, and the rows of its cache that it writes.

    previous: rows of the cache of the inputs before each segment, the nearest first. missing: which of them are before
    the sequence's first token. sources: for the nearest token before, the next one, and so on: where it is among the
    step's own inputs followed by the previous ones of all segments; None: each segment has one token. written: a row of
    the cache for each token, of the reserved block for those that newer ones replace. writes_first: the tokens of some
    segments of one token may follow each other, and read what the step writes.
    """

    previous: Tensor  # [num_segments, width - 1] int64
    missing: Tensor  # [num_segments, width - 1, 1] bool
    sources: tuple[Tensor, ...] | None  # each [num_tokens] int64
    written: Tensor  # [num_tokens] int64
    writes_first: bool


class Segments:
    """The consecutive tokens of each sequence in one step: planned once, for all layers."""

    def __init__(self, metadata: AttentionMetadata, block_size: int, requests: Sequence[RequestState] = ()) -> None:
        """requests: one for each segment, where layers keep a state for each; none: all segments are whole."""
        self._metadata = metadata
        self.is_decode = metadata.is_decode
        self.requests = requests or tuple(RequestState(0) for _ in metadata.query_lengths_host)
        self._block_size = block_size
        self._convolutions: dict[tuple[int, int], ConvolutionPlan] = {}
        self._windows: dict[int, tuple[tuple[Tensor, ...] | None, Tensor]] = {}
        lengths = metadata.kv_lengths.long()
        self._ends = lengths  # [num_segments]: position behind the last token of each, in its sequence
        if self.is_decode:
            self.positions = self.starts = lengths - 1
            return
        tokens = torch.arange(len(metadata.slots), device=lengths.device)
        bounds = metadata.cu_seqlens_q.long()
        self.owner = torch.searchsorted(bounds[1:], tokens, right=True)  # [num_tokens]: which segment a token is in
        self.starts = lengths - bounds.diff()  # [num_segments]: position of its first token in the sequence
        self.offsets = tokens - bounds[self.owner]  # [num_tokens]: index in the segment
        self.positions = self.starts[self.owner] + self.offsets  # [num_tokens]: position in the sequence

    def convolution(self, width: int, newest: int) -> ConvolutionPlan:
        """What a convolution over `width` tokens reads.

        Args:
            newest: Tokens of a block that have rows, at least `width - 1`. With more, the tokens of a draft may be
                checked as rows of their own.
        """
        found = self._convolutions.get((width, newest))
        if found is None:
            found = self._convolutions[width, newest] = self._plan(width, newest)
        return found

    def _plan(self, width: int, newest: int) -> ConvolutionPlan:
        size, writes_first = self._block_size, newest >= width
        newest = min(newest, size)
        lags = torch.arange(1, width, device=self.starts.device)
        before = self.starts.unsqueeze(1) - lags
        missing = before < 0
        before = before.clamp_(min=0)
        previous = self._metadata.block_tables.gather(1, before // size).long().mul_(newest).add_(before % newest)
        written = (self._metadata.slots // size).mul_(newest).add_(self.positions % newest)
        if self.is_decode:
            return ConvolutionPlan(previous, missing.unsqueeze(2), None, written, writes_first)
        last = torch.minimum(self._ends[self.owner], (self.positions // size + 1) * size)
        is_newest = self.positions + newest >= last
        sources = self._sources(width)
        written = torch.where(is_newest, written, self.positions % newest)
        return ConvolutionPlan(previous, missing.unsqueeze(2), sources, written, writes_first=False)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """The tokens [start, stop) of each segment among those of the step, by the host's lengths."""
        return list(pairwise(accumulate(self._metadata.query_lengths_host, initial=0)))

    @cached_property
    def singles(self) -> tuple[list[int], Tensor]:
        """Which segments have one token, and, on the device, the index of each one's token in the step."""
        numbers = [number for number, (first, stop) in enumerate(self.spans) if stop - first == 1]
        return numbers, torch.tensor([self.spans[number][0] for number in numbers], device=self.starts.device)

    @property
    def starts_host(self) -> list[int]:
        """How many tokens of each sequence were computed before."""
        lengths = zip(self._metadata.kv_lengths_host, self._metadata.query_lengths_host, strict=True)
        return [stop - count for stop, count in lengths]

    def window(self, width: int) -> tuple[tuple[Tensor, ...] | None, Tensor]:
        """What a convolution over `width` tokens reads whose inputs are kept for each request: the sources of a
        `ConvolutionPlan`, and, [num_segments, width - 1], where among the same inputs the newest of each segment are
        after the step, the nearest first."""
        found = self._windows.get(width)
        if found is None:
            found = self._windows[width] = None if self.is_decode else self._sources(width), self._trailing(width)
        return found

    def _sources(self, width: int) -> tuple[Tensor, ...]:
        tokens = torch.arange(len(self.positions), device=self.positions.device)
        behind = len(tokens) + self.owner * (width - 1)
        return tuple(
            torch.where(self.offsets >= lag, tokens - lag, behind + lag - 1 - self.offsets) for lag in range(1, width)
        )

    def _trailing(self, width: int) -> Tensor:
        bounds = self._metadata.cu_seqlens_q.long()
        lags = torch.arange(width - 1, device=bounds.device)
        number = torch.arange(len(bounds) - 1, device=bounds.device).unsqueeze(1)
        length = bounds.diff().unsqueeze(1)
        before = len(self._metadata.slots) + number * (width - 1) + lags - length
        return torch.where(lags < length, bounds[1:].unsqueeze(1) - 1 - lags, before)
