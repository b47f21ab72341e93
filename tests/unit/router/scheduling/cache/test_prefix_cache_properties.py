"""Whatever requests do, in whatever order: blocks are neither lost nor shared wrongly, and a prefix is what it says.

The blocks of a simulated memory remember what was last written at each of their positions: the whole text up to there,
as KV depends on all of it, on the namespace, and on contents where ids are placeholders. A prefix must read back
exactly as the prompt, and nothing live may ever be overwritten.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.effort import examples

from router.scheduling.cache.blocks import Allocation
from router.scheduling.cache.keys import ContentRange, cache_keys
from router.scheduling.cache.prefix_cache import PrefixCache

TOKENS = st.lists(st.integers(0, 1), max_size=12)
NAMESPACES = st.sampled_from(["", "", "x"])
DIGESTS = (b"A", b"B")
# At most two ranges, which do not overlap.
CONTENT = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.sampled_from(DIGESTS)), max_size=2).map(
    lambda drawn: [ContentRange(5 * n + start, 5 * n + min(start + length, 5), digest)
                   for n, (start, length, digest) in enumerate(drawn)]
)  # fmt: skip
Truth = tuple[str, tuple[int | bytes, ...]]


@dataclass(frozen=True)
class Kind:
    """What decides about KV besides the ids."""

    namespace: str = ""
    content: tuple[ContentRange, ...] = ()

    def truth(self, ids: list[int]) -> Truth:
        """What KV after these tokens depends on."""
        text: list[int | bytes] = list(ids)
        for one in self.content:
            for position in range(one.start, min(one.stop, len(ids))):
                text[position] = one.digest
        return self.namespace, tuple(text)


@dataclass(eq=False)
class Live:
    allocation: Allocation
    prompt: list[int]
    is_shareable: bool
    kind: Kind
    text: list[int]  # tokens whose KV is there

    @property
    def capacity(self) -> int:
        return len(self.allocation.blocks) * self.allocation.block_size


class PrefixCacheMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(2, 30), block_size=st.sampled_from([1, 1, 2, 3]))
    def start(self, num_blocks, block_size):
        self.cache = PrefixCache(num_blocks, block_size)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.memory: dict[int, Truth] = {}  # slot -> what its token and those before it were
        self.live: list[Live] = []
        self.ended: list[Live] = []

    def chosen(self, index: int) -> Live:
        return self.live[index % len(self.live)]

    def slot(self, live: Live, position: int) -> int:
        block = live.allocation.blocks[position // self.block_size]
        return block * self.block_size + position % self.block_size

    def write(self, live: Live, tokens: list[int]) -> None:
        """Compute these next tokens of the request; what does not fit is cut off."""
        for token in tokens[: live.capacity - len(live.text)]:
            position = len(live.text)
            block = live.allocation.blocks[position // self.block_size]
            assert sum(block in other.allocation.blocks for other in self.live) == 1
            live.text.append(token)
            self.memory[self.slot(live, position)] = live.kind.truth(live.text)

    @rule(
        prompt=TOKENS,
        num_more=st.integers(0, 6),
        is_shareable=st.sampled_from([True, True, True, False]),
        namespace=NAMESPACES,
        content=CONTENT,
    )
    def start_anew(self, prompt, num_more, is_shareable, namespace, content):
        self.allocate(prompt, num_more, is_shareable, Kind(namespace, tuple(content)))

    @rule(
        index=st.integers(0, 99),
        length=st.integers(0, 30),
        more=st.lists(st.integers(0, 1), max_size=4),
        other=st.sampled_from([None, None, "namespace", "content"]),
        namespace=NAMESPACES,
        content=CONTENT,
    )
    def continue_earlier(self, index, length, more, other, namespace, content):
        """The same ids; now and then in another namespace, or as placeholders of other contents."""
        earlier = self.live + self.ended[-8:]
        if earlier:
            one = earlier[index % len(earlier)]
            kind = Kind(
                namespace if other == "namespace" else one.kind.namespace,
                tuple(content) if other == "content" else one.kind.content,
            )
            self.allocate(one.text[:length] + more, 4, True, kind)

    def allocate(self, prompt: list[int], num_more: int, is_shareable: bool, kind: Kind) -> None:
        num_tokens = len(prompt) + num_more
        needed = -(-num_tokens // self.block_size)
        num_free, num_cached = self.cache.num_free, self.cache.num_cached
        allocation = self.cache.allocate(num_tokens, prompt if is_shareable else None, kind.namespace, kind.content)
        if allocation is None:
            assert needed > num_free
            assert (self.cache.num_free, self.cache.num_cached) == (num_free, num_cached)
            return
        assert (len(allocation.blocks), allocation.num_tokens) == (needed, num_tokens)
        assert allocation.prefix_length % self.block_size == 0
        assert allocation.prefix_length <= (len(prompt) if is_shareable else 0)
        self.live.append(Live(allocation, prompt, is_shareable, kind, prompt[: allocation.prefix_length]))

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), num_tokens=st.integers(1, 8))
    def prefill(self, index, num_tokens):
        live = self.chosen(index)
        self.write(live, live.prompt[len(live.text) :][:num_tokens])

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), tokens=TOKENS)
    def decode(self, index, tokens):
        live = self.chosen(index)
        if len(live.text) >= len(live.prompt):
            self.write(live, tokens)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), tokens=TOKENS)
    def run_and_share_all(self, index, tokens):
        live = self.chosen(index)
        self.write(live, live.prompt[len(live.text) :] + tokens)
        self.cache.commit(live.allocation, live.text)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), tokens=TOKENS)
    def run_and_end(self, index, tokens):
        live = self.chosen(index)
        self.write(live, live.prompt[len(live.text) :] + tokens)
        self.free(index, len(live.text), True)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99))
    def compute_last_prompt_token_again(self, index):
        live = self.chosen(index)
        if live.prompt and len(live.text) >= len(live.prompt):
            self.memory[self.slot(live, len(live.prompt) - 1)] = live.kind.truth(live.prompt)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), num_tokens=st.integers(0, 30))
    def commit(self, index, num_tokens):
        live = self.chosen(index)
        num_free = self.cache.num_free
        self.cache.commit(live.allocation, live.text[:num_tokens])
        # Only a copy of what others have cached can change the count: that is held now.
        assert self.cache.num_free <= num_free
        if live.is_shareable:
            num_shared = min(num_tokens, len(live.text)) // self.block_size * self.block_size
            found = self.cache.allocate(num_shared, live.text, live.kind.namespace, live.kind.content)
            assert found is not None
            assert found.prefix_length == num_shared
            self.check_text(found, live.kind, live.text[:num_shared])
            self.cache.free(found)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), num_blocks=st.integers(0, 5))
    def extend(self, index, num_blocks):
        allocation = self.chosen(index).allocation
        num_free, before, num_tokens = self.cache.num_free, list(allocation.blocks), allocation.num_tokens
        taken = self.cache.extend(allocation, num_blocks)
        if taken is None:
            assert num_blocks > num_free
            assert (allocation.blocks, allocation.num_tokens) == (before, num_tokens)
            assert self.cache.num_free == num_free
        else:
            assert allocation.blocks == before + taken
            assert allocation.num_tokens == len(allocation.blocks) * self.block_size
            assert self.cache.num_free == num_free - num_blocks

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 99), num_tokens=st.integers(0, 30), twice=st.booleans())
    def end(self, index, num_tokens, twice):
        self.free(index, num_tokens, twice)

    def free(self, index: int, num_tokens: int, twice: bool) -> None:
        live = self.chosen(index)
        self.live.remove(live)
        self.ended.append(live)
        text = live.text[:num_tokens]
        self.cache.free(live.allocation, text)
        if twice:
            self.cache.free(live.allocation, text)

    @rule(num_kept=st.integers(0, 2))
    def free_most(self, num_kept):
        while len(self.live) > num_kept:
            live = self.live.pop(0)
            self.ended.append(live)
            self.cache.free(live.allocation, live.text)
        if not self.live:
            assert self.cache.num_free == self.cache.num_usable == self.num_blocks - 1

    def check_text(self, allocation: Allocation, kind: Kind, text: list[int]) -> None:
        size = self.block_size
        for position in range(len(text)):
            slot = allocation.blocks[position // size] * size + position % size
            assert self.memory[slot] == kind.truth(text[: position + 1])

    @invariant()
    def everything_live_reads_back(self):
        for live in self.live:
            self.check_text(live.allocation, live.kind, live.text)

    @invariant()
    def everything_cached_reads_back(self):
        digests = {cache_keys([0], [ContentRange(0, 1, digest)])[0]: digest for digest in DIGESTS}
        roots = self.cache._trie.roots.items()
        nodes = [(namespace, child, []) for namespace, root in roots for child in root.children.values()]
        while nodes:
            namespace, node, before = nodes.pop()
            text = before + [digests.get(key, key) for key in node.key]
            for n, block in enumerate(node.blocks):
                for offset in range(self.block_size):
                    position = len(before) + n * self.block_size + offset
                    assert self.memory[block * self.block_size + offset] == (namespace, tuple(text[: position + 1]))
            nodes += [(namespace, child, text) for child in node.children.values()]

    @invariant()
    def every_block_has_one_place(self):
        trie = self.cache._trie
        in_trie, num_evictable = [], 0
        held = {id(live.allocation.trie_node) for live in self.live}
        nodes = [child for root in trie.roots.values() for child in root.children.values()]
        order = []
        while nodes:
            node = nodes.pop()
            order.append(node)
            assert node.parent.children[trie._edge(node.key, 0)] is node
            assert len(node.key) == len(node.blocks) * self.block_size > 0
            in_trie += node.blocks
            nodes += node.children.values()
        protected = set()
        for node in reversed(order):  # children before their parents
            if id(node) in held or any(id(child) in protected for child in node.children.values()):
                protected.add(id(node))
            else:
                num_evictable += len(node.blocks)
        assert trie.num_blocks == len(in_trie)
        assert self.cache.num_cached == num_evictable
        private = []
        for live in self.live:
            blocks = live.allocation.blocks
            assert len(set(blocks)) == len(blocks)
            private += set(blocks) - set(in_trie)
        stack = self.cache._free
        free = [*range(1, stack._num_untouched + 1), *stack._returned]
        assert sorted(free + in_trie + private) == list(range(1, self.num_blocks))
        assert self.cache.num_free == len(free) + num_evictable

    @invariant()
    def blocks_are_shared_by_equal_texts_only(self):
        seen: dict[int, Truth] = {}
        for live in self.live:
            for n, block in enumerate(live.allocation.blocks):
                text = live.kind.truth(live.text[: (n + 1) * self.block_size])
                assert seen.setdefault(block, text) == text


PrefixCacheMachine.TestCase.settings = settings(max_examples=examples(25, 400), stateful_step_count=50, deadline=None)
TestPrefixCache = PrefixCacheMachine.TestCase
