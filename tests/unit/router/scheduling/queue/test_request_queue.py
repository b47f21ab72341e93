"""next_batch: what is taken, what stays, and that putting back leaves no trace."""

from __future__ import annotations

import math

import pytest
from support.factories import make_request

from router.scheduling.cache.blocks import FreeList
from router.scheduling.entry import Entry
from router.scheduling.queue.budget import Budget
from router.scheduling.queue.request_queue import RequestQueue


class Setup:
    def __init__(
        self,
        capacity: int = 16000,
        block_size: int = 1,
        chunking: bool = False,
        decoder_prefix: int = 0,
    ) -> None:
        self.dropped: list[Entry] = []
        self.allocator = FreeList(capacity // block_size, block_size, decoder_prefix=decoder_prefix)
        self.queue = RequestQueue(
            block_size=block_size,
            allocator=self.allocator,
            chunking=chunking,
            decoder_prefix=decoder_prefix,
            on_dropped=self.dropped.append,
        )

    def add(self, *sizes: tuple[int, int]) -> list[Entry]:
        entries = [Entry(make_request("r", length, new)) for length, new in sizes]
        for entry in entries:
            self.queue.append(entry)
        return entries

    def next_ids(self, *args: int | None) -> list[int] | None:
        batch = self.queue.next_batch(Budget(*args))
        return None if batch is None else [e.request_id for e in batch.entries]


def test_since_when_the_first_waits():
    setup = Setup()
    assert not setup.queue.waits_since_before(math.inf)
    first, _ = setup.add((10, 5), (20, 5))
    assert setup.queue.waits_since_before(first.queued_at + 1)
    assert not setup.queue.waits_since_before(first.queued_at)


def test_how_much_waits():
    setup = Setup()
    assert not setup.queue.holds_tokens(1)
    setup.add((10, 5), (20, 5))
    assert setup.queue.holds_tokens(30)
    assert not setup.queue.holds_tokens(31)


def test_q1_an_empty_queue_gives_nothing():
    s = Setup()
    assert s.queue.next_batch(Budget(None, None, 1)) is None
    assert s.queue.next_batch(Budget(1, None, 1)) is None


def test_q2_a_minimum_that_is_not_reached_leaves_the_queue_alone():
    s = Setup(16)
    s.add((1, 1), (1, 1))
    batch = s.queue.next_batch(Budget(None, None, 2))
    assert batch.batch_id == 0
    assert [e.request_id for e in batch.entries] == [0, 1]
    assert all(e.started_at is not None for e in batch.entries)
    (third,) = s.add((1, 1))
    assert s.queue.next_batch(Budget(2, None, 2)) is None
    assert len(s.queue) == 1
    assert third.request_id == 2


def test_q3_max_size_bounds_the_batch():
    s = Setup()
    s.add((1, 1), (1, 1))
    assert s.next_ids(None, 1, 2) == [0]
    batch = s.queue.next_batch(Budget(None, 1, 2))
    assert batch.batch_id == 1
    assert len(s.queue) == 0


def test_q4_budgets_bound_the_batch():
    s = Setup()
    s.add((1, 1), (1, 1))
    assert s.next_ids(None, None, 1) == [0]
    s.add((1, 1))
    assert s.next_ids(None, None, 3) == [1, 2]


def test_q5_no_budget_no_batch():
    s = Setup()
    (entry,) = s.add((1, 1))
    assert s.queue.next_batch(Budget(None, None, 0)) is None
    assert entry.started_at is None
    assert len(s.queue) == 1


def test_max_size_zero_gives_nothing():
    s = Setup()
    s.add((1, 1))
    assert s.queue.next_batch(Budget(None, 0, 5)) is None


def test_q7_an_entry_whose_caller_left_is_forgotten():
    s = Setup()
    (entry,) = s.add((1, 1))
    entry.close()
    assert s.queue.next_batch(Budget(None, None, 1)) is None
    assert len(s.queue) == 0
    assert s.dropped == [entry]


def test_q8_the_prefill_budget_is_rounded_up_to_blocks():
    s = Setup(block_size=16)
    s.add((16, 1), (16, 1), (16, 1))
    assert s.next_ids(None, None, 20) == [0, 1]
    assert len(s.queue) == 1


def test_q9_nobody_overtakes_the_head():
    s = Setup()
    s.add((2000, 10), (2000, 10), (2000, 10), (10, 10))
    batch = s.queue.next_batch(Budget(None, None, 4096))
    assert [e.request_id for e in batch.entries] == [0, 1]
    assert len(s.queue) == 2
    assert s.allocator.num_free == 15999 - 2 * 2009


def test_q13_a_minimum_that_does_not_fit_puts_all_back():
    s = Setup()
    entries = s.add((10, 10), (10, 10), (10, 10), (10, 10))
    assert s.queue.next_batch(Budget(4, None, 25)) is None
    assert s.allocator.num_free == s.allocator.num_usable
    assert all(e.allocation is None and e.started_at is None for e in entries)
    assert s.next_ids(2, None, 25) == [0, 1]
    assert s.next_ids(2, None, 25) == [2, 3]


def test_k7_whole_blocks_are_reserved():
    s = Setup(1600, block_size=16)
    s.add(*[(100, 60)] * 12)
    assert s.next_ids(None, None, 4096) == list(range(9))
    assert s.allocator.num_free == 9
    assert len(s.queue) == 3


def test_k8_what_never_fits_can_be_told_beforehand():
    s = Setup(1600, block_size=16)
    assert s.queue.most_new_tokens(1000, 4096) == 585
    assert s.queue.most_new_tokens(4097, 4096) < 0


def test_p6_an_entry_over_the_prefill_budget_gives_its_blocks_back():
    s = Setup()
    _, second = s.add((60, 1), (50, 1))
    assert s.next_ids(None, None, 100) == [0]
    assert second.allocation is None
    assert s.allocator.num_free == s.allocator.num_usable - 60


def test_many_abandoned_entries_do_not_pile_up_behind_a_blocked_head():
    s = Setup(10)
    s.add((5, 5))
    assert s.next_ids(None, None, 100) == [0]
    s.add((5, 5))  # waits for blocks
    for entry in s.add(*[(1, 1)] * 200):
        entry.close()
        s.queue.caller_left()
    assert len(s.queue) < 100
    assert all(e.done for e in s.dropped)


def test_q10_the_last_prompt_is_split_at_the_budget():
    s = Setup(chunking=True)
    entries = s.add((2000, 10), (2000, 10), (2000, 10), (10, 10))
    batch = s.queue.next_batch(Budget(None, None, 4096))
    assert batch is not None
    assert [e.request_id for e in batch.entries] == [0, 1, 2]
    assert [e.chunk_len for e in entries] == [None, None, 96, None]
    assert len(s.queue) == 1


def test_q11_a_budget_that_is_used_up_splits_nothing():
    s = Setup(chunking=True)
    entries = s.add((2048, 10), (2048, 10), (5, 10))
    assert s.next_ids(None, None, 4096) == [0, 1]
    assert all(e.chunk_len is None for e in entries)
    assert entries[2].allocation is None
    assert s.allocator.num_free == s.allocator.num_usable - 2 * 2057


@pytest.mark.parametrize(("block_size", "chunk_len"), [(1, 4059), (16, 4064), (256, 4096)])
def test_q12_the_budget_is_rounded_up_to_blocks(block_size, chunk_len):
    s = Setup(block_size=block_size, chunking=True)
    (entry,) = s.add((10_000, 10))
    assert s.next_ids(None, None, 4059) == [0]
    assert entry.chunk_len == chunk_len


def test_an_entry_that_is_put_back_forgets_its_chunk():
    s = Setup(chunking=True)
    entries = s.add((10, 1), (10, 1))
    assert s.next_ids(3, None, 15) is None
    s.add((1, 1))
    assert s.next_ids(3, None, 15) is None  # the second one would be split, and be the last
    assert [e.chunk_len for e in entries] == [None, None]
    assert s.allocator.num_free == s.allocator.num_usable


def test_a_head_without_blocks_is_looked_up_again_only_when_something_was_freed(monkeypatch):
    s = Setup(30)
    first, _ = s.add((10, 11), (10, 11))
    assert s.next_ids(None, None, 4096) == [0]
    tries = []
    allocate = s.allocator.allocate
    monkeypatch.setattr(s.allocator, "allocate", lambda *args, **more: tries.append(args) or allocate(*args, **more))
    for _ in range(5):
        assert s.next_ids(None, None, 4096) is None
    assert not tries  # that there were none was seen when the first one was taken
    s.allocator.free(first.allocation)
    assert s.next_ids(None, None, 4096) == [1]
    assert len(tries) == 1


def test_a_head_without_blocks_whose_caller_has_left_makes_way():
    s = Setup(30)
    _, second, _ = s.add((10, 11), (10, 11), (2, 2))
    assert s.next_ids(None, None, 4096) == [0]
    assert s.next_ids(None, None, 4096) is None
    second.close()
    assert s.next_ids(None, None, 4096) == [2]


def test_an_encoder_takes_prompts_whole():
    s = Setup(chunking=True, decoder_prefix=1)
    first, second = s.add((10, 5), (10, 5))
    assert s.next_ids(None, None, 15) == [0]
    assert first.chunk_len is None
    assert s.next_ids(None, None, 5) == [1]  # the first in its step may exceed it
    assert second.chunk_len is None


def test_an_encoder_decoder_has_room_for_less():
    s, other = (Setup(64, 4, chunking=True, decoder_prefix=n) for n in (1, 0))
    assert other.queue.most_new_tokens(9, 100) - s.queue.most_new_tokens(9, 100) == 4
