"""KV blocks shared between requests of one namespace whose tokens begin alike."""

# | block                                         | state                                                          |
# |-----------------------------------------------|----------------------------------------------------------------|
# | on the stack                                  | free; its content is worthless                                 |
# | in the trie, its node protected               | shared by the live allocations that hold the node or one below |
# | in the trie, not protected                    | cached: it can be shared again, or evicted when blocks run out |
# | in an allocation's table, not in the trie     | private: written by that request alone                         |
#
# Blocks enter the trie only through `commit` and `free`, with tokens whose KV has been written; an allocation that is
# dropped before that leaves no trace. A block in the trie is never written with other values: it holds full blocks
# only, and a request writes after its prefix (or the last token of its prompt once more, with the same values).

from __future__ import annotations

from collections.abc import Sequence

from router.scheduling.cache.blocks import Allocation, BlockStack
from router.scheduling.cache.keys import ContentRange, cache_keys
from router.scheduling.cache.radix import RadixTrie
from router.scheduling.cache.states import StateSlots


class PrefixCache:
    """A `BlockAllocator` that shares, and evicts only for success."""

    def __init__(self, num_blocks: int, block_size: int, states: StateSlots | None = None) -> None:
        """Take the slots of states, if layers keep any: then prompts continue from saved states alone."""
        self.states = states
        self._free = BlockStack(num_blocks)
        self.version = 0
        self._num_usable = len(self._free)
        self._block_size = block_size
        self._trie = RadixTrie(block_size) if states is None else RadixTrie(block_size, states.forget)

    @property
    def num_free(self) -> int:
        return len(self._free) + self._trie.num_evictable

    @property
    def num_usable(self) -> int:
        return self._num_usable

    @property
    def num_cached(self) -> int:
        """Count blocks with KV and no holder, included in `num_free`."""
        return self._trie.num_evictable

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
        """Without success nothing is evicted."""
        size, states = self._block_size, self.states
        needed = -(-num_tokens // size)
        if states is not None and not states.has_any:
            return None
        if prompt_ids is None:
            private = self._pop(needed)
            if private is None:
                return None
            return Allocation(private, num_tokens, size, state=None if states is None else states.start(num_tokens))
        keys, restored = cache_keys(prompt_ids, content), None
        node, shared = self._trie.find(keys, num_tokens // size, namespace)
        num_known, is_junction = len(shared), bool(node.children)
        if states is not None:
            # Blocks behind the state are computed again, and others may read them: the request gets its own.
            restored, depth = node.checkpoint(num_known, (len(keys) - 1) // size)
            if depth < num_known:
                node, shared = self._trie.find(keys, depth, namespace)
        self._trie.hold(node)  # before anything is evicted
        private = self._pop(needed - len(shared))
        if private is None:
            self._trie.release(node)
            return None
        num_shared = len(shared)
        shared += private
        allocation = Allocation(shared, num_tokens, size, num_shared * size, node, num_shared, content)
        if states is not None:
            num_prompt = len(keys) if num_prompt is None else num_prompt
            allocation.state = states.start(num_prompt, restored)
            states.plan_saves(
                allocation.state,
                num_shared * size,
                num_known * size,
                answer_start=answer_start,
                is_junction=is_junction,
            )
        return allocation

    def match(self, prompt_ids: Sequence[int], namespace: str = "", content: Sequence[ContentRange] = ()) -> int:
        """Count the tokens that `allocate` would find now, without holding them."""
        return self._trie.num_matching(cache_keys(prompt_ids, content), namespace)

    def extend(self, allocation: Allocation, num_blocks: int) -> list[int] | None:
        """Extend; what the request shares is held."""
        taken = self._pop(num_blocks)
        if taken is not None:
            allocation.append(taken)
        return taken

    def commit(self, allocation: Allocation, token_ids: Sequence[int]) -> None:
        """Share full blocks, without those of an answer where no state is saved behind it.

        Raises:
            ValueError: `token_ids` are not those shared before.
        """
        state = allocation.state
        if state is not None:
            token_ids = token_ids[: state.num_prompt]
        start, depth = allocation.trie_node, allocation.num_in_trie
        num_full = min(len(token_ids) // self._block_size, len(allocation.blocks))
        if start is None or num_full <= depth:
            return
        tokens = cache_keys(token_ids, allocation.content)
        size = self._block_size
        if depth and tokens[(depth - 1) * size : depth * size] != start.key[-size:]:
            raise ValueError("these are not the tokens that the request has shared before")
        self.version += 1
        node, present = self._trie.insert(tokens, allocation.blocks[:num_full], start, depth)
        allocation.duplicates += allocation.blocks[depth:present]
        allocation.num_in_trie = num_full
        if node is not start:
            self._trie.hold(node)
            self._trie.release(start)
            allocation.trie_node = node
        if self.states is not None and state is not None:
            self.states.register(state, node, num_full, size)

    def free(self, allocation: Allocation, token_ids: Sequence[int] = ()) -> None:
        self.version += 1
        self.commit(allocation, token_ids)
        if allocation.trie_node is not None:
            self._trie.release(allocation.trie_node)
            allocation.trie_node = None
        self._free.give_back(allocation.duplicates)
        self._free.give_back(allocation.blocks[allocation.num_in_trie :])
        if self.states is not None and allocation.state is not None:
            self.states.free(allocation.state)
        allocation.forget()

    def _pop(self, num_blocks: int) -> list[int] | None:
        missing = num_blocks - len(self._free)
        if missing > self._trie.num_evictable:
            return None
        if missing > 0:
            self._free.give_back(self._trie.evict(missing))
        return self._free.pop(num_blocks)
