"""KV blocks: which request holds which part of the shards' cache."""

# Who owns a block:
# | block                       | owner                                                                    |
# |-----------------------------|--------------------------------------------------------------------------|
# | 0                           | no request; the health probe and padding rows write there                |
# | of a queued entry           | none is held; allocation happens when the entry is taken into a batch    |
# | of a running entry          | the entry's `Allocation`                                                 |
# | of an entry that has ended  | `pipeline.Pipeline`, until every call in flight at its end is answered       |
# | all others                  | the allocator: free, or (`prefix_cache.PrefixCache`) cached for prompts   |
#
# A block of a running entry that has become shareable belongs to the prefix cache; the entry's `Allocation` holds it.

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.scheduling.cache.keys import ContentRange
from router.scheduling.cache.radix import RadixNode
from router.scheduling.cache.states import StatePlace, StateSlots
from wire.decoder_blocks import positions_between


@dataclass(slots=True)
class Allocation:
    """Blocks for `num_tokens` positions, of which `prefix_length` (whole blocks) hold KV; `blocks` in logical order."""

    blocks: list[int]
    num_tokens: int
    block_size: int
    prefix_length: int = 0
    # The node that it holds; its path covers the first `num_in_trie` blocks. None: not to be shared, or freed.
    trie_node: RadixNode | None = field(default=None, repr=False, compare=False)
    num_in_trie: int = field(default=0, repr=False, compare=False)
    content: Sequence[ContentRange] = field(default=(), repr=False, compare=False)
    # Private blocks among those first ones: another request had shared the same tokens before.
    duplicates: list[int] = field(default_factory=list, repr=False, compare=False)
    # Its slots of states; None: layers keep none, or given back.
    state: StatePlace | None = field(default=None, repr=False, compare=False)
    # Positions that hold no token: between the prompt's last block and a decoder's first generated token.
    between: int = 0

    def append(self, blocks: list[int]) -> None:
        """Append blocks, and count positions to their end."""
        self.blocks += blocks
        self.num_tokens = max(self.num_tokens, len(self.blocks) * self.block_size - self.between)

    def forget(self) -> None:
        """Forget what was given back."""
        self.blocks = []
        self.duplicates = []
        self.num_in_trie = 0
        self.state = None


class BlockAllocator(Protocol):
    """What the scheduler needs of `FreeList` or `PrefixCache`."""

    states: StateSlots | None

    @property
    def num_free(self) -> int:
        """Count allocatable blocks: free, and cached without holders."""
        ...

    @property
    def num_cached(self) -> int:
        """Count free blocks with known KV."""
        ...

    @property
    def num_usable(self) -> int:
        """Blocks that exist for requests."""
        ...

    @property
    def version(self) -> int:
        """Change when a failed `allocate` might succeed."""
        ...

    def allocate(
        self,
        num_tokens: int,
        prompt_ids: Sequence[int] | None,
        namespace: str = "",
        content: Sequence[ContentRange] = (),
        *,
        num_prompt: int | None = None,
        answer_start: int = 0,
    ) -> Allocation | None:
        """Allocate `num_tokens` positions, if possible.

        Args:
            prompt_ids: None: not shared.
            num_prompt: How many of `prompt_ids` are the prompt, before what was generated; None: all.
            answer_start: How many of them a chat has in front of all answers to its last user message; 0: unknown.
            namespace: Within which blocks are shared.
            content: Where ids are placeholders; holds for `commit` and `free` too.
        """
        ...

    def extend(self, allocation: Allocation, num_blocks: int) -> list[int] | None:
        """Append `num_blocks`, and return them, or None, unchanged."""
        ...

    def commit(self, allocation: Allocation, token_ids: Sequence[int]) -> None:
        """Share full blocks of the first `token_ids`, whose KV is written, while the request runs."""
        ...

    def free(self, allocation: Allocation, token_ids: Sequence[int] = ()) -> None:
        """Share full blocks as `commit`, then give all back, once."""
        ...


class BlockStack:
    """Free blocks from 1 on, the last returned first.

    Untouched ones are only counted, so that a pool of millions costs nothing.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_untouched = max(num_blocks - 1, 0)
        self._returned: list[int] = []

    def __len__(self) -> int:
        return self._num_untouched + len(self._returned)

    def pop(self, num_blocks: int) -> list[int]:
        """Take the last blocks, which must be there."""
        assert 0 <= num_blocks <= len(self)
        cut = len(self._returned) - num_blocks
        if cut >= 0:
            taken = self._returned[cut:]
            del self._returned[cut:]
            return taken
        end = self._num_untouched + 1
        taken = [*range(end + cut, end), *self._returned]
        self._num_untouched += cut
        self._returned.clear()
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        self._returned.extend(blocks)


class FreeList:
    """A stack without sharing, like TGI's simple allocator."""

    def __init__(
        self, num_blocks: int, block_size: int, states: StateSlots | None = None, *, decoder_prefix: int = 0
    ) -> None:
        """Take the slots of states, if layers keep any, and the length of a decoder's prefix."""
        self.states = states
        self._decoder_prefix = decoder_prefix
        self._free = BlockStack(num_blocks)
        self.version = 0
        self._num_usable = len(self._free)
        self._block_size = block_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return 0

    @property
    def num_usable(self) -> int:
        return self._num_usable

    def allocate(
        self,
        num_tokens: int,
        prompt_ids: Sequence[int] | None = None,
        namespace: str = "",
        content: Sequence[ContentRange] = (),
        *,
        num_prompt: int | None = None,
        answer_start: int = 0,
    ) -> Allocation | None:
        if self.states is not None and not self.states.has_any:
            return None
        num_prompt = num_tokens if num_prompt is None else num_prompt
        between = positions_between(num_prompt, self._decoder_prefix, self._block_size)
        blocks = self._pop(-(-(num_tokens + between) // self._block_size))
        if blocks is None:
            return None
        state = None if self.states is None else self.states.start(num_tokens)
        return Allocation(blocks, num_tokens, self._block_size, between=between, state=state)

    def extend(self, allocation: Allocation, num_blocks: int) -> list[int] | None:
        taken = self._pop(num_blocks)
        if taken is not None:
            allocation.append(taken)
        return taken

    def commit(self, allocation: Allocation, token_ids: Sequence[int]) -> None:
        """Nothing is shared here."""

    def free(self, allocation: Allocation, token_ids: Sequence[int] = ()) -> None:
        self.version += 1
        self._free.give_back(allocation.blocks)
        if self.states is not None and allocation.state is not None:
            self.states.free(allocation.state)
        allocation.forget()

    def _pop(self, num_blocks: int) -> list[int] | None:
        return self._free.pop(num_blocks) if num_blocks <= len(self._free) else None
