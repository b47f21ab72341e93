"""The trie of KV blocks: what it finds, what it forgets first, what it protects."""

from __future__ import annotations

import pytest

from router.scheduling.cache.radix import RadixTrie


def _trie(*keys: list[int]) -> RadixTrie:
    """Single-token blocks whose ids are the tokens."""
    trie = RadixTrie(1)
    for key in keys:
        trie.insert(key, key)
    return trie


def _found(trie: RadixTrie, tokens: list[int]) -> list[int]:
    return trie.find(tokens)[1]


def test_insert_tells_what_was_known_already():
    trie = RadixTrie(1)
    known = [trie.insert(key, key)[1] for key in ([0, 1, 2], [0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4])]
    assert known == [0, 3, 0, 3]
    assert trie.insert([0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 5, 6, 7])[1] == 4
    assert trie.num_blocks == trie.num_evictable == 3 + 3 + 2 + 3


def test_insert_compares_whole_blocks():
    trie = RadixTrie(2)
    keys = ([0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [0, 1, 3, 4, 5, 6, 7, 8])
    known = [trie.insert(key, list(range(10 * n, 10 * n + len(key) // 2)))[1] for n, key in enumerate(keys)]
    assert [2 * k for k in known] == [0, 4, 0, 4, 2]
    assert _found(trie, [0, 1, 2, 3, 4, 5]) == [0, 1, 32]
    assert _found(trie, [0, 1, 3, 4, 5, 6, 0]) == [0, 41, 42]
    assert _found(trie, [0, 1, 2]) == [0]
    assert _found(trie, [0]) == []


def test_find_follows_splits():
    trie = _trie([0, 1, 2], [1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5, 6, 7])
    for key in ([0], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 3, 5]):
        assert _found(trie, key) == key
    assert _found(trie, [0, 1, 9]) == [0, 1]
    assert _found(trie, [9, 0, 1]) == []


def test_find_stops_at_the_limit():
    trie = _trie([0, 1, 2, 3])
    node, blocks = trie.find([0, 1, 2, 3], 2)
    assert blocks == node.blocks == [0, 1]
    assert trie.find([0, 1, 2, 3], 0) == (trie.root_of(""), [])


def test_the_least_recently_used_leaf_goes_first():
    trie = _trie([0, 1, 2], [0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 3, 4], [1, 2, 3])
    assert trie.evict(1) == [7]
    assert _found(trie, [0, 1, 2, 3, 5, 6, 7]) == [0, 1, 2, 3, 5, 6]
    trie.find([0, 1, 2, 3, 4])
    trie.find([1, 2, 3])
    assert trie.evict(2) == [5, 6]
    assert _found(trie, [0, 1, 2, 3, 5, 6, 7]) == [0, 1, 2, 3]
    trie.find([1, 2, 3])
    assert trie.evict(3) == [4, 3, 2]
    assert _found(trie, [0, 1, 2, 3, 4]) == [0, 1]
    assert trie.evict(10) == [1, 2, 3, 0, 1]
    assert trie.num_blocks == trie.num_evictable == 0
    assert not trie.root_of("").children


def test_exactly_the_only_entry_is_found():
    trie = _trie([0, 1, 2])
    node, blocks = trie.find([0, 1, 2])
    assert node is not trie.root_of("")
    assert blocks == [0, 1, 2]


def test_a_partial_match_is_the_same_node_as_its_prefix():
    trie = _trie([0, 1, 2], [0, 1, 2, 3, 4, 5])
    node, blocks = trie.find([0, 1, 3, 4, 5])
    assert blocks == [0, 1]
    assert trie.find([0, 1])[0] is node


def test_a_hold_protects_its_path_and_nothing_else():
    trie = _trie([0, 1, 2, 3, 4], [5])
    node, _ = trie.find([0, 1, 9])
    trie.hold(node)
    assert trie.num_evictable == 4
    assert sorted(trie.evict(10)) == [2, 3, 4, 5]
    assert _found(trie, [0, 1, 2]) == [0, 1]
    trie.release(node)
    assert trie.num_evictable == 2
    assert trie.evict(10) == [0, 1]


def test_a_held_node_that_is_split_protects_its_whole_path():
    trie = _trie([0, 1, 2, 3])
    node, _ = trie.find([0, 1, 2, 3])
    trie.hold(node)
    trie.insert([0, 1, 7], [0, 1, 7])
    trie.find([0])
    assert node.blocks == [2, 3]
    assert trie.num_evictable == 1
    assert trie.evict(10) == [7]
    assert _found(trie, [0, 1, 2, 3]) == [0, 1, 2, 3]
    trie.release(node)
    assert trie.num_evictable == 4
    assert trie.evict(4) == [2, 3, 1, 0]


def test_the_last_of_several_holds_ends_the_protection():
    trie = _trie([0, 1], [0, 1, 2])
    upper, lower = trie.find([0, 1])[0], trie.find([0, 1, 2])[0]
    for node in (upper, lower, lower):
        trie.hold(node)
    trie.release(lower)
    assert trie.num_evictable == 0
    trie.release(lower)
    assert trie.num_evictable == 1
    trie.release(upper)
    assert trie.num_evictable == 3


def test_what_was_used_until_now_outlives_what_was_inserted_meanwhile():
    trie = _trie([0, 1])
    node, _ = trie.find([0, 1])
    trie.hold(node)
    trie.insert([5, 6], [5, 6])
    trie.release(node)
    assert trie.evict(2) == [5, 6]


def test_a_path_is_as_recent_as_its_most_recent_end():
    trie = _trie([0, 1])
    leaf, _ = trie.insert([0, 1, 2], [0, 1, 2])
    trie.hold(leaf)
    trie.insert([7], [7])
    trie.release(leaf)
    trie.insert([8], [8])
    assert trie.evict(2) == [7, 2]
    assert trie.evict(3) == [0, 1, 8]


def test_a_sole_holder_makes_its_node_longer():
    trie = _trie([0, 1])
    node, _ = trie.find([0, 1])
    trie.hold(node)
    assert trie.insert([0, 1, 2], [0, 1, 2], node, 2) == (node, 2)
    assert (trie.num_blocks, trie.num_evictable) == (3, 0)
    trie.hold(node)
    other, _ = trie.insert([0, 1, 2, 3], [0, 1, 2, 3], node, 3)
    assert other is not node
    assert (trie.num_blocks, trie.num_evictable) == (4, 1)


def test_a_sole_holder_leaves_what_is_below_its_node():
    trie = _trie([0, 1], [0, 1, 5])
    node, _ = trie.find([0, 1])
    trie.hold(node)
    other, _ = trie.insert([0, 1, 2], [0, 1, 2], node, 2)
    assert other is not node
    assert _found(trie, [0, 1, 5]) == [0, 1, 5]
    assert _found(trie, [0, 1, 2]) == [0, 1, 2]


def test_a_long_chain_of_nodes_needs_no_recursion():
    trie = RadixTrie(1)
    length = 1500
    tokens = list(range(length))
    trie.insert(tokens, tokens)
    for n in range(length - 1, 0, -1):
        trie.find(tokens, n)
    node, blocks = trie.find(tokens)
    assert blocks == tokens
    assert node.blocks == [length - 1]
    trie.hold(node)
    assert trie.num_evictable == 0
    trie.release(node)
    assert trie.evict(length) == tokens[::-1]


@pytest.mark.parametrize("block_size", [1, 3])
@pytest.mark.parametrize("position", [0, 511, 512, 513, 1535, 2000])
def test_long_keys_differ_anywhere(block_size, position):
    tokens = list(range(2100))
    trie = RadixTrie(block_size)
    trie.insert(tokens, list(range(2100 // block_size)))
    other = [*tokens[:position], -1, *tokens[position + 1 :]]
    assert _found(trie, other) == list(range(position // block_size))


def test_the_eviction_queue_does_not_grow_with_use():
    trie = _trie([0, 1], [2, 3], [4, 5])
    for _ in range(50):
        for key in ([0, 1], [2, 3], [4, 5]):
            node, _blocks = trie.find(key)
            trie.hold(node)
            trie.release(node)
    assert len(trie._queue) == 3
    assert trie.evict(3) == [0, 1, 3]


def test_namespaces_know_nothing_of_each_other():
    trie = RadixTrie(1)
    trie.insert([0, 1, 2], [1, 2, 3])
    there, blocks = trie.find([0, 1, 2], namespace="x")
    assert there is trie.root_of("x") and blocks == []
    trie.insert([0, 1, 5], [4, 5, 6], there)
    assert _found(trie, [0, 1, 2]) == [1, 2, 3]
    assert trie.find([0, 1, 2], namespace="x")[1] == [4, 5]
    assert trie.num_blocks == trie.num_evictable == 6


def test_roots_of_namespaces_without_blocks_are_forgotten():
    trie = RadixTrie(1)
    held, _ = trie.find([0], namespace="held")
    trie.hold(held)
    below, _ = trie.insert([0], [1], trie.root_of("below"))
    trie.hold(below)
    for number in range(1000):
        node, _ = trie.insert([0, 1], [2, 3], trie.root_of(f"a@{number}"))
        trie.hold(node)
        trie.find([0], namespace=f"b@{number}")
        trie.release(node)
        assert trie.evict(2) == [2, 3]
    assert len(trie.roots) < 200
    assert trie.root_of("held") is held and trie.find([0], namespace="below") == (below, [1])
    trie.release(held)
    trie.release(below)
    assert [root.num_protectors for root in trie.roots.values()] == [0] * len(trie.roots)


def test_the_least_recently_used_leaf_of_any_namespace_goes_first():
    trie = RadixTrie(1)
    for block, namespace in enumerate(("a", "b", "c")):
        trie.insert([0], [block], trie.root_of(namespace))
    trie.find([0], namespace="a")
    assert trie.evict(3) == [1, 2, 0]
