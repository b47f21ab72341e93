"""How much of a device's memory becomes KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from model_server.errors import FatalError, OutOfMemoryError

# The rest is for what no warm-up shows: steps whose memory is cut differently, growing communication buffers. TGI keeps
# back a tenth of the whole device (TGI_WIGGLE_ROOM 0.90).
CACHE_SHARE = 0.97


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A warm-up's findings on the device, in bytes."""

    total: int
    # Unused between steps, before there is a cache, beside other processes.
    free: int
    # What the largest step takes beyond that.
    peak: int
    # What CUDA graphs will take.
    graphs: int

    def budget(self, fraction: float) -> int:
        """Return bytes for the cache within `fraction` of the device; may be negative."""
        return int(self.free - (1.0 - fraction) * self.total) - self.peak - self.graphs


def cache_blocks(measured: Measured, fraction: float, block_bytes: int) -> int:
    return max(0, int(measured.budget(fraction) * CACHE_SHARE)) // block_bytes


class DeviceMemory(Protocol):
    """The memory of one device."""

    def start(self) -> None:
        """Start measuring the next `peak`."""

    def peak(self) -> int:
        """Return the most bytes in use beyond those at `start`."""

    def rest(self) -> tuple[int, int]:
        """Return (free, total) bytes with all work done and nothing kept for reuse."""


class CudaMemory:
    """Counts what torch has taken from the device, gaps included."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def start(self) -> None:
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


def is_out_of_memory(error: BaseException | None) -> bool:
    """Recognize lack of memory on device or host, for which torch has no type."""
    if isinstance(error, FatalError):  # what the engine makes of it where there are other ranks
        return is_out_of_memory(error.__cause__)
    kinds = (OutOfMemoryError, torch.OutOfMemoryError, MemoryError)
    # For the driver (a graph, a module that is loaded) torch and Triton also raise plain errors.
    text = str(error) if isinstance(error, RuntimeError) else ""
    return isinstance(error, kinds) or "can't allocate memory" in text or "out of memory" in text
