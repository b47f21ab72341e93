"""The prefix cache hands out the blocks that TGI's radix allocator would, and shares only what has been written."""

from __future__ import annotations

import pytest

from router.scheduling.cache.blocks import Allocation
from router.scheduling.cache.prefix_cache import PrefixCache

IDS = list(range(1000, 2000))


def _cached(cache: PrefixCache, num_tokens: int, prompt: list[int]) -> Allocation:
    """A request that has run: its prompt is written, and it has ended. Returns what it had."""
    allocation = cache.allocate(num_tokens, prompt)
    seen = Allocation(allocation.blocks, num_tokens, allocation.block_size, allocation.prefix_length)
    cache.free(allocation, prompt)
    return seen


def _num_uncached(cache: PrefixCache) -> int:
    return cache.num_free - cache.num_cached


@pytest.mark.parametrize(
    ("block_size", "num_tokens", "prompt", "blocks", "prefix_length"),
    [
        (2, 8, [0, 1, 2, 3], [8, 9, 10, 11], 4),
        (2, 7, [0, 1, 2], [8, 9, 10, 11], 2),
        (1, 8, [0, 1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11], 4),
    ],
)
def test_a_prompt_finds_its_own_blocks_again(block_size, num_tokens, prompt, blocks, prefix_length):
    cache = PrefixCache(12, block_size)
    assert cache.num_usable == cache.num_free == 11
    first = cache.allocate(num_tokens, prompt)
    assert (first.blocks, first.prefix_length) == (blocks, 0)
    cache.free(first, prompt)
    again = cache.allocate(num_tokens, prompt)
    assert (again.blocks, again.prefix_length) == (blocks, prefix_length)


def test_the_oldest_prompt_is_evicted_first():
    cache = PrefixCache(7, 1)
    first, second = cache.allocate(4, [0, 1, 2, 3]), cache.allocate(2, [4, 5])
    assert (first.blocks, second.blocks) == ([3, 4, 5, 6], [1, 2])
    cache.free(first, [0, 1, 2, 3])
    cache.free(second, [4, 5])
    third = cache.allocate(4, [6, 7, 8, 9])
    assert (third.blocks, third.prefix_length) == ([3, 4, 5, 6], 0)


def test_duplicates_of_known_blocks_return_to_the_stack():
    cache = PrefixCache(10, 1)
    prompt = [0, 1, 2, 3]
    first, second = cache.allocate(4, prompt), cache.allocate(4, prompt)
    cache.free(second, prompt)
    cache.free(first, prompt)
    assert cache.allocate(4, prompt).prefix_length == 4
    assert cache.num_free == 5


def test_prompts_that_part_share_their_common_beginning():
    cache = PrefixCache(20, 1)
    assert _cached(cache, 4, [0, 1]).blocks == [16, 17, 18, 19]
    x = cache.allocate(8, [0, 1, 2, 3, 4, 5])
    y = cache.allocate(8, [0, 1, 2, 3, 6, 7])
    assert (x.blocks, x.prefix_length) == ([16, 17, 12, 13, 14, 15, 18, 19], 2)
    assert (y.blocks, y.prefix_length) == ([16, 17, 6, 7, 8, 9, 10, 11], 2)
    cache.free(y, [0, 1, 2, 3, 6, 7])
    cache.free(x, [0, 1, 2, 3, 4, 5])
    assert _num_uncached(cache) == 11
    x = cache.allocate(6, [0, 1, 2, 3, 4, 5])
    y = cache.allocate(6, [0, 1, 2, 3, 6, 7])
    assert (x.blocks, x.prefix_length) == ([16, 17, 6, 7, 14, 15], 6)
    assert (y.blocks, y.prefix_length) == ([16, 17, 6, 7, 8, 9], 6)
    assert _num_uncached(cache) == cache.num_free == 11


def test_only_full_blocks_are_shared():
    cache = PrefixCache(100, 16)
    assert _cached(cache, 49, IDS[:40]).blocks == [96, 97, 98, 99]
    assert (_num_uncached(cache), cache.num_cached) == (97, 2)
    again = cache.allocate(49, IDS[:40])
    assert again.prefix_length == 32
    cache.free(again)
    exact = cache.allocate(41, IDS[:32])
    assert (exact.blocks, exact.prefix_length) == ([96, 97, 99], 32)  # the queue computes the last token again


def test_nothing_is_evicted_in_vain():
    cache = PrefixCache(100, 1)
    _cached(cache, 40, IDS[:40])
    cache.allocate(50, None)
    assert (_num_uncached(cache), cache.num_free) == (9, 49)
    assert cache.allocate(60, IDS[500:560]) is None
    assert (_num_uncached(cache), cache.num_free) == (9, 49)
    # The cached blocks are its own prefix here, and 9 are too few for the other 20.
    assert cache.allocate(60, IDS[:60]) is None
    assert cache.extend(cache.allocate(1, None), 49) is None
    assert cache.allocate(40, IDS[:40]).prefix_length == 40


def test_two_equal_prompts_at_the_same_time_are_cached_once():
    cache = PrefixCache(1000, 1)
    prompt = IDS[:300]
    first, second = cache.allocate(349, prompt), cache.allocate(349, prompt)
    assert (first.prefix_length, second.prefix_length) == (0, 0)
    assert (len(first.blocks), len(second.blocks)) == (349, 349)
    cache.commit(first, prompt)
    cache.commit(second, prompt)
    assert cache.num_free == 301
    own = list(second.blocks)
    cache.free(first, prompt)
    assert (second.blocks, cache.num_cached) == (own, 0)  # its table refers to its own copies, the hold to the others
    cache.free(second, prompt)
    assert (_num_uncached(cache), cache.num_cached) == (699, 300)


def test_a_continued_conversation_finds_its_answer_too():
    cache = PrefixCache(1000, 1)
    conversation = IDS[:170]
    first = cache.allocate(149, conversation[:100])
    cache.commit(first, conversation[:100])
    cache.free(first, conversation[:149])
    assert cache.allocate(219, conversation).prefix_length == 149


def test_a_prompt_that_must_not_be_shared_is_neither_found_nor_cached():
    cache = PrefixCache(1000, 1)
    _cached(cache, 40, IDS[:40])
    alone = cache.allocate(40, None)
    assert alone.prefix_length == 0
    cache.commit(alone, IDS[100:140])
    cache.free(alone, IDS[100:140])
    assert cache.num_cached == 40
    assert cache.allocate(40, IDS[100:140]).prefix_length == 0


def test_shared_blocks_are_counted_once():
    cache = PrefixCache(1000, 1)
    prompt = IDS[:400]
    _cached(cache, 400, prompt)
    assert _num_uncached(cache) == 599
    live = [cache.allocate(449, prompt) for _ in range(3)]
    assert [a.prefix_length for a in live] == [400, 400, 400]
    assert cache.num_free == 452
    for allocation in live:
        cache.free(allocation)
    assert (cache.num_free, cache.num_cached) == (999, 400)


def test_what_was_never_written_is_never_found():
    cache = PrefixCache(1000, 1)
    put_back = cache.allocate(100, IDS[:100])
    cache.free(put_back)
    failed = cache.allocate(100, IDS[:100])
    assert failed.prefix_length == 0
    cache.commit(failed, IDS[:30])  # its first chunk
    cache.free(failed, IDS[:30])
    assert cache.allocate(100, IDS[:100]).prefix_length == 30


def test_a_running_request_shares_its_prompt_at_once():
    cache = PrefixCache(50, 4)
    first = cache.allocate(24, IDS[:18])
    cache.commit(first, IDS[:9])
    assert cache.allocate(24, IDS[:18]).prefix_length == 8
    cache.commit(first, IDS[:18])
    second = cache.allocate(24, IDS[:18])
    assert second.prefix_length == 16
    assert second.blocks[:4] == first.blocks[:4]
    cache.free(first, IDS[:18])
    assert cache.num_cached == 0  # the second one still holds them


def test_duplicates_in_the_middle_of_a_table():
    cache = PrefixCache(50, 1)
    slow, quick = cache.allocate(10, IDS[:10]), cache.allocate(6, IDS[:6])
    cache.commit(slow, IDS[:2])
    cache.commit(quick, IDS[:6])
    cache.commit(slow, IDS[:10])
    found = cache.allocate(10, IDS[:10])
    assert found.blocks == slow.blocks[:2] + quick.blocks[2:6] + slow.blocks[6:]
    for allocation in (slow, quick, found):
        cache.free(allocation)
    assert (cache.num_free, cache.num_cached) == (49, 10)


def test_a_request_grows_and_evicts_others():
    cache = PrefixCache(10, 2)
    _cached(cache, 8, IDS[:8])
    growing = cache.allocate(7, IDS[100:107])
    assert (_num_uncached(cache), cache.num_cached) == (1, 4)
    taken = cache.extend(growing, 3)
    assert growing.blocks[4:] == taken
    assert growing.num_tokens == 14
    assert growing.num_tokens == 14
    assert (_num_uncached(cache), cache.num_cached) == (0, 2)
    assert cache.extend(growing, 3) is None
    assert len(growing.blocks) == 7
    assert cache.num_cached == 2


def test_growing_never_evicts_the_own_path():
    cache = PrefixCache(10, 1)
    _cached(cache, 5, IDS[:5])
    growing = cache.allocate(6, IDS[:6])
    assert cache.extend(growing, 3) is not None
    assert cache.extend(growing, 1) is None
    assert len(set(growing.blocks)) == 9
    cache.free(growing, IDS[:9])
    assert cache.num_cached == 9


def test_freeing_twice_gives_back_once():
    cache = PrefixCache(20, 2)
    allocation = cache.allocate(9, IDS[:6])
    cache.free(allocation, IDS[:6])
    cache.free(allocation, IDS[:6])
    cache.commit(allocation, IDS[:6])
    cache.free(allocation)
    assert (cache.num_free, cache.num_cached) == (19, 3)


def test_a_lookup_shares_no_more_than_is_asked_for():
    cache = PrefixCache(20, 4)
    _cached(cache, 16, IDS[:16])
    allocation = cache.allocate(10, IDS[:16])
    assert (len(allocation.blocks), allocation.prefix_length) == (3, 8)


def test_tokens_beyond_the_table_are_not_shared():
    cache = PrefixCache(20, 4)
    allocation = cache.allocate(8, IDS[:8])
    cache.free(allocation, IDS[:16])
    assert cache.num_cached == 2


def test_a_request_cannot_change_its_past():
    cache = PrefixCache(20, 2)
    allocation = cache.allocate(8, IDS[:8])
    cache.commit(allocation, IDS[:4])
    with pytest.raises(ValueError, match="shared before"):
        cache.commit(allocation, IDS[10:18])


def test_tuples_and_lists_are_the_same_prompt():
    cache = PrefixCache(20, 2)
    allocation = cache.allocate(8, tuple(IDS[:8]))
    cache.free(allocation, tuple(IDS[:8]))
    assert cache.allocate(8, IDS[:8]).prefix_length == 8
    assert cache.allocate(8, tuple(IDS[:8])).prefix_length == 8


def test_block_zero_is_never_given_out():
    cache = PrefixCache(4, 1)
    assert cache.allocate(4, IDS[:4]) is None
    assert cache.allocate(3, IDS[:3]).blocks == [1, 2, 3]
    assert PrefixCache(0, 1).allocate(1, [1]) is None
