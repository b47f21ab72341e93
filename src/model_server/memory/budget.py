"""How much of a device's memory becomes KV cache: the arithmetic, and where its numbers come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

# The rest is for what no warm-up shows: steps whose memory is cut differently, growing communication buffers. TGI keeps
# back a tenth of the whole device (TGI_WIGGLE_ROOM 0.90).
CACHE_SHARE = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a warm-up found out about the device, in bytes.

    total: the device's memory. free: what is unused between two steps, before there is a cache; others on the device
    are counted as they are now. peak: what the largest step takes beyond that. graphs: what CUDA graphs will take.
    """

    total: int
    free: int
    peak: int
    graphs: int

    def budget(self, fraction: float) -> int:
        """Bytes that are left for the cache if `fraction` of the device may be used, by us and the others together.
        May be negative."""
        return int(self.free - (1.0 - fraction) * self.total) - self.peak - self.graphs


def cache_blocks(measured: Measured, fraction: float, block_bytes: int) -> int:
    """Blocks of `block_bytes` that fit; 0 if none does."""
    return max(0, int(measured.budget(fraction) * CACHE_SHARE)) // block_bytes


class DeviceMemory(Protocol):
    """The memory of one device."""

    def begin(self) -> None:
        """What is in use now is no part of the next `peak`."""

    def peak(self) -> int:
        """Most bytes in use at once since `begin`, beyond what was in use then."""

    def rest(self) -> tuple[int, int]:
        """(free, total) bytes of the device once all work is done and nothing is kept for reuse."""


class CudaMemory:
    """Counts what torch has taken from the device, not what tensors use of it: the gaps are needed as well."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_reserved(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        return max(0, torch.cuda.max_memory_reserved(self._device) - self._before)

    def rest(self) -> tuple[int, int]:
        """`mem_get_info` sees other processes too."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)
