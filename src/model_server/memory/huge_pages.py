"""Memory of a CPU for weights and KV cache, in pages of 2 MiB where Linux gives them."""

# A step reads all weights once. In pages of 4 KiB the processor looks up a translation for each of them, and its
# prefetchers stop at each end (a served token of one client: 17.3 ms so, 14.2 ms in large pages; AVX2, 135M, bfloat16).
# Most systems give large pages only to memory that asks for them (`madvise`), which allocators do not, and matrices
# smaller than a page must be adjacent to share one.

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

PAGE = 2 * 2**20
# What is asked of the system at once. Pages that nothing has touched yet take no memory.
CHUNK = 32 * PAGE
# Tensors begin at whole cache lines.
ALIGNMENT = 64


class Arena:
    """Hands out memory of mappings that live as long as their tensors."""

    def __init__(self, size: int = CHUNK) -> None:
        """Take the bytes of a mapping; its end, short of a large page, has small ones."""
        self._size = size
        self._lock = threading.Lock()
        self._chunk: mmap.mmap | None = None
        self._start = 0  # of the chunk, and of its next piece, in the mapping
        self._next = 0
        self._end = 0
        self._large = 0  # bytes in large pages
        self._earlier = 0  # that chunks before this one take
        self._in_pieces = 0

    @property
    def spare_bytes(self) -> int:
        """Bound the bytes beside the tensors' numbers, up to ends of lines and pages."""
        with self._lock:
            return self._earlier + self._taken - self._in_pieces

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        count = math.prod(shape)
        if count == 0:
            return torch.zeros(shape, dtype=dtype)
        size = math.ceil(count * dtype.itemsize / ALIGNMENT) * ALIGNMENT
        with self._lock:
            if self._next + size > self._end:
                self._map(size)
            chunk, offset = self._chunk, self._next
            self._next += size
            self._in_pieces += count * dtype.itemsize
        assert chunk is not None
        return torch.frombuffer(chunk, dtype=dtype, count=count, offset=offset).view(shape)

    @property
    def _taken(self) -> int:
        """Count bytes of pages that hold tensors."""
        used = self._next - self._start
        if used <= self._large:
            return math.ceil(used / PAGE) * PAGE
        return self._large + math.ceil((used - self._large) / mmap.PAGESIZE) * mmap.PAGESIZE

    def _map(self, size: int) -> None:
        length = math.ceil(max(size, self._size) / PAGE) * PAGE
        large = length if size > self._size else self._size // PAGE * PAGE
        try:
            chunk = mmap.mmap(-1, length + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"no memory for {length / 2**20:.0f} MiB: {error}") from error
        address = torch.frombuffer(chunk, dtype=torch.uint8, count=1).data_ptr()
        self._earlier += self._taken
        self._chunk, self._start, self._large = chunk, -address % PAGE, large
        self._next, self._end = self._start, self._start + length
        # A system without large pages, or not Linux: the memory is good all the same.
        with contextlib.suppress(OSError, AttributeError):
            chunk.madvise(mmap.MADV_HUGEPAGE, self._next, large)


# Of what lives as long as the model.
WEIGHTS = Arena()
zeros = WEIGHTS.zeros
