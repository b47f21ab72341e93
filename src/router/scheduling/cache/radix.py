"""Radix tries from tokens to KV blocks, by namespace, of one pool and order of eviction."""

# An edge carries whole blocks: a node's key has `block_size` numbers for each of its blocks, one per token (`keys.py`).
# Children are found by the keys of their first block (the number itself when blocks hold one token), so no two
# different blocks can be confused.
#
# | term      | meaning                                                                                           |
# |-----------|---------------------------------------------------------------------------------------------------|
# | hold      | a user of the path from the root to a node's end; `hold` takes it, `release` gives it back        |
# | protected | a node that is held itself or has a protected child; it is never evicted                          |
# | evictable | all other nodes; least recently used leaves go first, so every one of them can be evicted in turn |

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush, heapreplace
from itertools import compress, count
from operator import ne

# Keys are compared in pieces of this length: fast because lists are compared in C, and a mismatch costs one piece.
_PIECE = 512
# Roots beside those in use, beyond which those of namespaces without blocks are forgotten.
_SPARE_ROOTS = 64


@dataclass(eq=False, slots=True)
class Checkpoint:
    """A saved state, behind the first `offset` blocks of `node`."""

    slot: int
    kind: int
    last_use: int
    node: RadixNode
    offset: int
    is_proven: bool = False  # it was used, or wanted again


class RadixNode:
    """A run of blocks below `parent`; a root has neither."""

    __slots__ = ("blocks", "checkpoints", "children", "is_queued", "key", "last_access", "num_protectors", "parent")

    def __init__(self, key: list[int], blocks: list[int], parent: RadixNode | None, last_access: int) -> None:
        self.key = key
        self.blocks = blocks
        self.parent = parent
        self.children: dict[Hashable, RadixNode] = {}
        self.last_access = last_access
        self.num_protectors = 0  # holds of this very node, and protected children
        self.is_queued = False  # it has an entry in the eviction queue
        self.checkpoints: dict[int, Checkpoint] = {}  # by offset

    def holder(self, depth: int, target: int) -> tuple[RadixNode, int]:
        """Find the node, this one or above, with block `target` of the path, and how many of its blocks that is.

        Args:
            depth: Blocks of the path to the end of this node.
        """
        node = self
        while (start := depth - len(node.blocks)) >= target:
            assert node.parent is not None, "the target is on the path"
            node, depth = node.parent, start
        return node, target - start

    def checkpoint(self, depth: int, limit: int) -> tuple[Checkpoint | None, int]:
        """Find the deepest checkpoint of the path behind at most `limit` blocks, and its depth; without, 0.

        Args:
            depth: Blocks of the path to the end of this node.
        """
        node: RadixNode | None = self
        while node is not None:
            start = depth - len(node.blocks)
            offset = max((offset for offset in node.checkpoints if start + offset <= limit), default=None)
            if offset is not None:
                return node.checkpoints[offset], start + offset
            node, depth = node.parent, start
        return None, 0

    def cut_checkpoints(self) -> list[Checkpoint]:
        """Forget the checkpoints behind the last block; return them."""
        gone = [one for offset, one in self.checkpoints.items() if offset > len(self.blocks)]
        for one in gone:
            del self.checkpoints[one.offset]
        return gone


class RadixTrie:
    """Blocks whose KV is known."""

    def __init__(
        self, block_size: int, on_forgotten: Callable[[list[Checkpoint]], None] = lambda checkpoints: None
    ) -> None:
        """Call `on_forgotten` for checkpoints that go with their last block."""
        self._on_forgotten = on_forgotten
        self.roots: dict[str, RadixNode] = {}
        self._most_roots = _SPARE_ROOTS
        self.num_blocks = 0
        self.num_evictable = 0  # blocks in unprotected nodes
        self._block_size = block_size
        self._time = 0  # counts finds, inserts and releases
        # A heap of (last access, serial number, node) with at most one entry per node. Entries may be out of date:
        # earlier than the node's last access, or of a node that has got children or holds. That is put right when
        # they come to the front.
        self._queue: list[tuple[int, int, RadixNode]] = []
        self._serial = count()

    def root_of(self, namespace: str) -> RadixNode:
        """Return a namespace's root."""
        root = self.roots.get(namespace)
        if root is None:
            if len(self.roots) >= self._most_roots:
                self._forget_roots()
            root = self.roots[namespace] = RadixNode([], [], None, 0)
        return root

    def _forget_roots(self) -> None:
        """Drop empty, unheld roots: adapters come and go."""
        self.roots = {name: root for name, root in self.roots.items() if root.children or root.num_protectors}
        self._most_roots = 2 * len(self.roots) + _SPARE_ROOTS

    def find(
        self, tokens: list[int], max_blocks: int | None = None, namespace: str = ""
    ) -> tuple[RadixNode, list[int]]:
        """Find the longest known prefix in whole blocks: last node, blocks. A partly matching node is split."""
        limit = len(tokens) // self._block_size
        if max_blocks is not None:
            limit = min(limit, max_blocks)
        self._time += 1
        blocks: list[int] = []
        node, _ = self._descend(self.root_of(namespace), tokens, 0, limit, blocks)
        return node, blocks

    def num_matching(self, tokens: Sequence[int], namespace: str = "") -> int:
        """Count the tokens of the longest known prefix in whole blocks, changing nothing."""
        size, depth = self._block_size, 0
        keys, node = list(tokens), self.roots.get(namespace)
        while node is not None and (depth + 1) * size <= len(keys):
            child = node.children.get(self._edge(keys, depth * size))
            if child is None:
                break
            shared = _common_length(child.key, keys, depth * size, len(keys)) // size
            depth += shared
            node = child if shared == len(child.blocks) else None
        return depth * size

    def insert(
        self, tokens: list[int], blocks: list[int], start: RadixNode | None = None, depth: int = 0
    ) -> tuple[RadixNode, int]:
        """Make `blocks` known; return their last node, and how many were known.

        Args:
            start: A held node covering `depth` blocks; None: the root of "".
        """
        self._time += 1
        held = self.root_of("") if start is None else start
        node, present = self._descend(held, tokens, depth, len(blocks), None)
        if present == len(blocks):
            return node, present
        size = self._block_size
        key, added = tokens[present * size : len(blocks) * size], blocks[present:]
        self.num_blocks += len(added)
        if node is start and node.num_protectors == 1 and not node.children and node.parent is not None:
            # The caller is its only user: a request that grows makes its node longer, not the trie deeper.
            node.key += key
            node.blocks += added
            node.last_access = self._time
            return node, present
        leaf = RadixNode(key, added, node, self._time)
        node.children[self._edge(key, 0)] = leaf
        self.num_evictable += len(added)
        self._enqueue(leaf)
        return leaf, present

    def hold(self, node: RadixNode) -> None:
        """Protect the path to a node."""
        while node.parent is not None:
            node.num_protectors += 1
            if node.num_protectors > 1:
                return
            self.num_evictable -= len(node.blocks)
            node = node.parent
        node.num_protectors += 1

    def release(self, node: RadixNode) -> None:
        """Undo a `hold`; the node was used until now."""
        self._time += 1
        node.last_access = self._time
        while node.parent is not None:
            node.num_protectors -= 1
            if node.num_protectors:
                return
            self.num_evictable += len(node.blocks)
            if not node.children:
                self._enqueue(node)
            node = node.parent
        node.num_protectors -= 1

    def evict(self, num_blocks: int) -> list[int]:
        """Forget `num_blocks` least recently used blocks, or all evictable."""
        evicted: list[int] = []
        queue = self._queue
        while queue and (missing := num_blocks - len(evicted)) > 0:
            queued_at, _, node = queue[0]
            if node.num_protectors or node.children:
                heappop(queue)
                node.is_queued = False
            elif queued_at < node.last_access:
                heapreplace(queue, (node.last_access, next(self._serial), node))
            elif missing < len(node.blocks):
                evicted += node.blocks[-missing:]
                del node.blocks[-missing:]
                del node.key[-missing * self._block_size :]
                self._on_forgotten(node.cut_checkpoints())
            else:
                heappop(queue)
                evicted += node.blocks
                self._on_forgotten(list(node.checkpoints.values()))
                self._remove(node)
        self.num_blocks -= len(evicted)
        self.num_evictable -= len(evicted)
        return evicted

    def _descend(
        self, node: RadixNode, tokens: list[int], depth: int, limit: int, found: list[int] | None
    ) -> tuple[RadixNode, int]:
        """Follow `tokens` below `node` up to block `limit`; return the end, and blocks covered."""
        size = self._block_size
        while depth < limit:
            child = node.children.get(self._edge(tokens, depth * size))
            if child is None:
                break
            shared = _common_length(child.key, tokens, depth * size, limit * size) // size
            is_partial = shared < len(child.blocks)
            node = self._split(child, shared) if is_partial else child
            node.last_access = self._time
            depth += shared
            if found is not None:
                found += node.blocks
            if is_partial:
                break
        return node, depth

    def _edge(self, tokens: list[int], start: int) -> Hashable:
        size = self._block_size
        return tokens[start] if size == 1 else tuple(tokens[start : start + size])

    def _split(self, node: RadixNode, num_blocks: int) -> RadixNode:
        """Put the first blocks of `node` above it, so that its holds protect the path."""
        assert node.parent is not None
        cut = num_blocks * self._block_size
        upper = RadixNode(node.key[:cut], node.blocks[:num_blocks], node.parent, node.last_access)
        upper.num_protectors = 1 if node.num_protectors else 0
        node.parent.children[self._edge(upper.key, 0)] = upper
        del node.key[:cut]
        del node.blocks[:num_blocks]
        checkpoints, node.checkpoints = node.checkpoints, {}
        for one in checkpoints.values():  # each stays behind its last block
            if one.offset <= num_blocks:
                one.node = upper
            else:
                one.offset -= num_blocks
            one.node.checkpoints[one.offset] = one
        node.parent = upper
        upper.children[self._edge(node.key, 0)] = node
        return upper

    def _remove(self, leaf: RadixNode) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[self._edge(leaf.key, 0)]
        # The parent may look older than it is: a use of the child is not noted in its ancestors. No matter: all other
        # leaves are younger than the child was, so the parent is rightly the next to go.
        if not parent.children and not parent.num_protectors and parent.parent is not None:
            self._enqueue(parent)

    def _enqueue(self, leaf: RadixNode) -> None:
        if not leaf.is_queued:
            leaf.is_queued = True
            heappush(self._queue, (leaf.last_access, next(self._serial), leaf))


def _common_length(key: list[int], tokens: list[int], start: int, end: int) -> int:
    """Count equal numbers at the beginning."""
    length = min(len(key), end - start)
    for piece in range(0, length, _PIECE):
        stop = min(piece + _PIECE, length)
        left, right = key[piece:stop], tokens[start + piece : start + stop]
        if left != right:
            return piece + next(compress(count(), map(ne, left, right)))
    return length
