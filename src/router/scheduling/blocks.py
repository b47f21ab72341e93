"""KV blocks: who holds which part of the shards' cache.

Who owns a block:
| block                       | owner                                                                    |
|-----------------------------|--------------------------------------------------------------------------|
| 0                           | nobody; the health probe and padding rows write there                    |
| of a queued entry           | none is held; allocation happens when the entry is taken into a batch    |
| of a running entry          | the entry's `Allocation`                                                 |
| of an entry that has ended  | `pipeline.Pipeline`, until every call that may still write it is answered |
| all others                  | the allocator's free list                                                |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol


@dataclass(slots=True)
class Allocation:
    """Blocks for `num_tokens` token positions; the first `prefix_length` of them already hold the prompt's KV."""

    blocks: list[int]
    num_tokens: int
    block_size: int
    prefix_length: int = 0

    def slots(self) -> Sequence[int]:
        """One slot per token position (block * block_size + offset).

        A windowed allocation has fewer blocks than its positions need and goes round them again.
        """
        size = self.block_size
        if size == 1 and len(self.blocks) == self.num_tokens:
            return self.blocks
        one_round = list(chain.from_iterable([range(b * size, b * size + size) for b in self.blocks]))
        if len(one_round) < self.num_tokens:
            one_round *= -(-self.num_tokens // len(one_round))
        del one_round[self.num_tokens :]
        return one_round


class BlockAllocator(Protocol):
    """What the queue needs; the free list below implements it, a prefix cache may."""

    @property
    def num_free(self) -> int:
        """Blocks that an allocation could get now."""
        ...

    @property
    def num_usable(self) -> int:
        """Blocks that exist for requests."""
        ...

    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] | None) -> Allocation | None:
        """Blocks for `num_tokens` positions, or None. `prompt_ids` is None for a prompt that must not be shared."""
        ...

    def free(self, allocation: Allocation, num_written: int) -> None:
        """Give back. Only the first `num_written` positions hold valid KV; nothing beyond them may be reused."""
        ...


class FreeList:
    """Blocks in a stack, without sharing. Hands out the most recently freed first, like TGI's simple allocator."""

    def __init__(self, num_blocks: int, block_size: int, window_size: int | None = None) -> None:
        self._free = list(range(1, num_blocks))  # block 0 is reserved
        self._num_usable = max(num_blocks - 1, 0)
        self._block_size = block_size
        self._window_size = window_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        return self._num_usable

    def allocate(self, num_tokens: int, prompt_ids: Sequence[int] | None = None) -> Allocation | None:
        stored = num_tokens if self._window_size is None else min(num_tokens, self._window_size)
        needed = -(-stored // self._block_size)
        if needed > len(self._free):
            return None
        cut = len(self._free) - needed
        blocks = self._free[cut:]
        del self._free[cut:]
        return Allocation(blocks, num_tokens, self._block_size)

    def free(self, allocation: Allocation, num_written: int = 0) -> None:
        self._free.extend(allocation.blocks)
        allocation.blocks = []  # a second free of the same allocation gives back nothing
