"""Small values between host and device, without waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Views of every number type may begin at multiples of this.
_ALIGNMENT = 16
# Copies that may be under way at once before the host waits for the oldest. What steps in flight have is far below it.
MOST_BUFFERS = 64
# Bytes of a buffer at first: positions and ids of 256 rows and some table entries.
_SMALLEST = 1 << 14


class Event(Protocol):
    """Marks the end of a copy: `torch.cuda.Event` or a stand-in."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(slots=True)
class _Buffer:
    """A pinned buffer; `copied`: the end of its newest copy."""

    memory: Tensor
    copied: Event


class Staging:
    """Uploads through reused pinned buffers, all arrays of a call in one copy; on the device thread.

    A buffer is not written before its copy is over; if all are busy there is one more, so the host does not wait. On a
    CPU tensors share the arrays' memory (`shares_memory`).
    """

    def __init__(
        self,
        device: torch.device,
        *,
        allocate: Callable[[int], Tensor] | None = None,
        new_event: Callable[[], Event] | None = None,
    ) -> None:
        self._device = device
        self.shares_memory = device.type == "cpu" and allocate is None
        self._allocate = allocate or _pinned
        self._new_event: Callable[[], Event] = new_event or torch.cuda.Event
        self._buffers: deque[_Buffer] = deque()  # the one that was used last at the end

    def upload(self, *arrays: npt.NDArray[np.generic]) -> list[Tensor]:
        """Return tensors of the arrays' present values; on a CPU the arrays themselves, which must not change."""
        if self.shares_memory:
            return [torch.from_numpy(array) for array in arrays]
        places, size = [], 0
        for array in arrays:
            places.append(size)
            size += -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size == 0:
            return [torch.from_numpy(array).to(self._device) for array in arrays]
        buffer = self._free_buffer(size)
        host = buffer.memory.numpy()
        for array, place in zip(arrays, places, strict=True):
            host[place : place + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        on_device = torch.empty(size, dtype=torch.uint8, device=self._device)
        on_device.copy_(buffer.memory[:size], non_blocking=True)
        buffer.copied.record()
        tensors = []
        for array, place in zip(arrays, places, strict=True):
            dtype = torch.from_numpy(array[:0]).dtype
            tensors.append(on_device[place : place + array.nbytes].view(dtype).view(array.shape))
        return tensors

    def _free_buffer(self, size: int) -> _Buffer:
        """Find a buffer that no copy reads; the first of all is over first."""
        room = max(_SMALLEST, 1 << (size - 1).bit_length())
        if not self._buffers or (len(self._buffers) < MOST_BUFFERS and not self._buffers[0].copied.query()):
            buffer = _Buffer(self._allocate(room), self._new_event())
        else:
            buffer = self._buffers.popleft()
            buffer.copied.synchronize()
            if buffer.memory.shape[0] < size:
                buffer.memory = self._allocate(room)
        self._buffers.append(buffer)
        return buffer


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy to `device`; only from pinned memory without waiting for queued work."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def download(tensor: Tensor) -> Tensor:
    """Copy to the host; from a GPU, read it after an event recorded later is over."""
    if not tensor.is_cuda:
        return tensor
    on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return on_host.copy_(tensor, non_blocking=True)
