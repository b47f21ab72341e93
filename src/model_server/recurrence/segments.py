"""Where a forward's tokens are in their sequences, computed on the device from its lengths, also in captured steps."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.cpp.structs import CachedInputsStruct, SegmentsStruct


@dataclass(frozen=True)
class ConvolutionPlan:
    """What a convolution reads and caches."""

    # Cache rows of inputs before each segment, the nearest first.
    previous: Tensor  # [num_segments, width - 1] int64
    # Which of them are before the sequence.
    missing: Tensor  # [num_segments, width - 1, 1] bool
    # For the nearest token before, the next one, and so on: its place in the step's inputs followed by all `previous`;
    # None: single tokens.
    sources: tuple[Tensor, ...] | None  # each [num_tokens] int64
    # A cache row for each token, reserved for those that newer ones replace.
    written: Tensor  # [num_tokens] int64
    # Segments of one token may follow each other, and read what the step writes.
    writes_first: bool
    # Rows of the reserved block: what goes there is lost.
    reserved: int

    @cached_property
    def struct(self) -> CachedInputsStruct:
        """Return the plan for C++ operators, valid for as long as this object."""
        return CachedInputsStruct(
            previous=self.previous.data_ptr(),
            missing=self.missing.data_ptr(),
            written=self.written.data_ptr(),
            reserved=self.reserved,
            writes_first=self.writes_first,
        )


class Segments:
    """Each sequence's consecutive tokens in a step, planned once for all layers."""

    def __init__(self, metadata: AttentionMetadata, block_size: int, slots: list[int] | None = None) -> None:
        """Take the slot of each segment's state where layers keep states; else None."""
        self._metadata = metadata
        self.is_decode = metadata.is_decode
        self.slots_host = slots or []
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
        """Plan a convolution over `width` tokens.

        Args:
            newest: Cached tokens of a block; more than `width - 1` let drafts be checked as rows.
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
            return ConvolutionPlan(previous, missing.unsqueeze(2), None, written, writes_first, newest)
        last = torch.minimum(self._ends[self.owner], (self.positions // size + 1) * size)
        is_newest = self.positions + newest >= last
        sources = self._sources(width)
        written = torch.where(is_newest, written, self.positions % newest)
        return ConvolutionPlan(previous, missing.unsqueeze(2), sources, written, writes_first=False, reserved=newest)

    @cached_property
    def starts_host(self) -> list[int]:
        """Return each segment's first position, by the host's lengths; C++ operators do without."""
        return starts_of(self._metadata)

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """Return each segment's tokens [start, stop), by the host's lengths."""
        return list(pairwise(accumulate(self._metadata.query_lengths_host, initial=0)))

    @cached_property
    def singles(self) -> tuple[list[int], Tensor]:
        """Return the segments of one token, and their tokens on the device."""
        numbers = [number for number, (first, stop) in enumerate(self.spans) if stop - first == 1]
        return numbers, torch.tensor([self.spans[number][0] for number in numbers], device=self.starts.device)

    @cached_property
    def slots(self) -> Tensor:
        """Return the segments' slots on the device, [num_segments] int64."""
        return torch.tensor(self.slots_host, dtype=torch.int64, device=self.starts.device)

    @cached_property
    def fresh(self) -> Tensor | None:
        """Return which sequences begin with the step, [num_segments] bool; None: none does."""
        return self.starts == 0 if 0 in self.starts_host else None

    @cached_property
    def struct(self) -> SegmentsStruct:
        """Return the segments for C++ operators, valid for as long as this object."""
        metadata = self._metadata
        return SegmentsStruct(
            count=len(metadata.query_lengths_host),
            bounds=metadata.cu_seqlens_q.data_ptr(),
            lengths=metadata.kv_lengths.data_ptr(),
            slots=self.slots.data_ptr() if self.slots_host else None,
        )

    def window(self, width: int) -> tuple[tuple[Tensor, ...] | None, Tensor]:
        """Return a convolution's sources with inputs kept per request, and the newest inputs [num_segments,
        width - 1].
        """
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


def starts_of(metadata: AttentionMetadata) -> list[int]:
    """Return the tokens computed before the step, by sequence."""
    lengths = zip(metadata.kv_lengths_host, metadata.query_lengths_host, strict=True)
    return [stop - count for stop, count in lengths]
