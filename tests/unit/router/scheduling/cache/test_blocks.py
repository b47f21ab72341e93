"""The free list hands out the blocks that TGI's simple allocator would."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.scheduling.cache.blocks import FreeList


def test_takes_the_end_of_the_stack_and_returns_to_it():
    blocks = FreeList(12, 2)
    first = blocks.allocate(8)
    assert first.blocks == [8, 9, 10, 11]
    assert blocks.allocate(3).blocks == [6, 7]
    blocks.free(first)
    assert blocks.allocate(6).blocks == [9, 10, 11]


def test_block_zero_is_never_given_out():
    blocks = FreeList(4, 1)
    assert blocks.num_usable == 3
    assert blocks.allocate(4) is None
    assert blocks.allocate(3).blocks == [1, 2, 3]


def test_the_last_block_may_be_used_in_part():
    allocation = FreeList(10, 4).allocate(6)
    assert (allocation.blocks, allocation.num_tokens) == ([8, 9], 6)


def test_freeing_twice_gives_back_once():
    blocks = FreeList(10, 1)
    allocation = blocks.allocate(5)
    blocks.free(allocation)
    blocks.free(allocation)
    assert blocks.num_free == 9


def test_a_running_request_grows_by_whole_blocks():
    blocks = FreeList(10, 4)
    allocation = blocks.allocate(6)
    assert blocks.extend(allocation, 2) == [6, 7]
    assert (allocation.blocks, allocation.num_tokens) == ([8, 9, 6, 7], 16)
    assert blocks.extend(allocation, 6) is None
    assert (len(allocation.blocks), blocks.num_free) == (4, 5)
    blocks.free(allocation, range(16))
    assert blocks.num_free == 9


def test_a_decoder_begins_in_a_block_of_its_own():
    blocks = FreeList(20, 4, decoder_prefix=1)
    # Two blocks of the prompt; the prefix and two generated tokens in one more.
    allocation = blocks.allocate(7, num_prompt=5)
    assert (len(allocation.blocks), allocation.num_tokens) == (3, 7)
    blocks.extend(allocation, 1)
    assert allocation.num_tokens == 5 + 7
    assert len(blocks.allocate(5, num_prompt=4).blocks) == 2


def test_nothing_is_shared_without_a_prefix_cache():
    blocks = FreeList(10, 1)
    allocation = blocks.allocate(4, [1, 2, 3, 4])
    blocks.commit(allocation, [1, 2, 3, 4])
    other = blocks.allocate(4, [1, 2, 3, 4])
    assert other.prefix_length == 0
    assert not set(other.blocks) & set(allocation.blocks)


@given(
    block_size=st.sampled_from([1, 2, 16]),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 40)), max_size=60),
)
def test_blocks_are_neither_shared_nor_lost(block_size, steps):
    blocks = FreeList(40, block_size)
    live = []
    for take, size in steps:
        if take or not live:
            allocation = blocks.allocate(size)
            if allocation is None:
                assert -(-size // block_size) > blocks.num_free
            else:
                live.append(allocation)
        else:
            blocks.free(live.pop(size % len(live)))
        used = [b for allocation in live for b in allocation.blocks]
        assert 0 not in used
        assert len(set(used)) == len(used)
        assert len(used) + blocks.num_free == blocks.num_usable
