"""Prompts with images in the queue: KV is shared by their content, and first chunks end outside of them."""

from __future__ import annotations

from typing import Any

import pytest
from support.factories import make_request

from router.request import PlacedImage
from router.scheduling.cache.prefix_cache import PrefixCache
from router.scheduling.entry import Entry
from router.scheduling.queue.budget import Budget
from router.scheduling.queue.request_queue import RequestQueue
from wire.images.prepared import ImagePlace, PreparedImage

PROMPT = 40
PLACE = (8, 24)


def entry(key: bytes, *, is_indivisible: bool = False) -> Entry:
    """A prompt of 40 tokens of which 8 to 24 are one image."""
    start, stop = PLACE
    place = ImagePlace(key, start, stop - start)
    placed = PlacedImage(PreparedImage(key, "", stop - start), place, is_indivisible)
    ids = (*range(100, 108), *[7] * 16, *range(200, 216))
    return Entry(make_request("r", PROMPT, 1, input_ids=ids, images=(placed,)))


def make_queue(cache: PrefixCache, *, chunking: bool = True) -> RequestQueue:
    return RequestQueue(block_size=4, allocator=cache, chunking=chunking, may_share=lambda request: True)


def admitted(queue: RequestQueue, tokens: int = 1000, **others: Any) -> list[Entry]:
    batch = queue.next_batch(Budget(None, None, tokens, 10_000, **others))
    return [] if batch is None else batch.entries


def prefix_of(cache: PrefixCache, one: Entry) -> int:
    """How many tokens of its prompt are shared; afterwards all of them are in the cache."""
    queue = make_queue(cache)
    queue.append(one)
    assert admitted(queue) == [one]
    allocation = one.allocation
    assert allocation is not None
    shared = allocation.prefix_length
    cache.free(allocation, one.token_ids)
    return shared


def test_equal_images_share_their_blocks_and_others_share_what_is_before() -> None:
    cache = PrefixCache(100, 4)
    first = b"a" * 32
    flipped = bytes([first[0] ^ 1]) + first[1:]
    assert prefix_of(cache, entry(first)) == 0
    assert prefix_of(cache, entry(first)) >= PROMPT - 4
    for other in (flipped, b"b" * 32, b"\x00" * 32):
        assert prefix_of(cache, entry(other)) == PLACE[0]
    assert prefix_of(cache, entry(first)) >= PROMPT - 4


@pytest.mark.parametrize(
    ("budget", "is_indivisible", "expected"),
    [(12, False, 12), (12, True, 8), (8, True, 8), (24, True, 24), (28, True, 28), (4, True, 4), (40, True, None)],
)
def test_the_first_chunk_ends_outside_of_an_image_that_is_whole(
    budget: int, is_indivisible: bool, expected: int | None
) -> None:
    queue = make_queue(PrefixCache(100, 4))
    one = entry(b"a" * 32, is_indivisible=is_indivisible)
    queue.append(one)
    assert admitted(queue, budget) == [one]
    assert one.chunk_len == expected


def test_an_image_that_is_first_in_its_step_is_computed_whole_and_behind_others_it_waits() -> None:
    cache = PrefixCache(100, 4)
    prefix_of(cache, Entry(make_request("r", 9, 1, input_ids=(*range(100, 108), 1))))  # up to the image
    queue = make_queue(cache)
    one = entry(b"a" * 32, is_indivisible=True)
    queue.append(one)
    assert admitted(queue, 8) == [one]
    assert one.allocation is not None and (one.allocation.prefix_length, one.chunk_len) == (8, 16)
    queue.append(Entry(make_request("other", 4, 1, input_ids=(1, 2, 3, 4))))
    queue.append(entry(b"b" * 32, is_indivisible=True))
    assert len(admitted(queue, 12)) == 1
    assert len(queue) == 1


def test_the_first_chunks_of_a_step_have_no_more_rows_to_encode_than_its_budget() -> None:
    """An image has 16 rows, all of which are encoded for the first of its tokens."""
    cases: list[tuple[int, dict[str, Any], list[int | None]]] = [
        (1000, {"image_rows": 32}, [None, None]),
        (1000, {"image_rows": 31}, [None, 8]),
        (1000, {"image_rows": 15}, [None, 8]),  # always one image
        (1000, {"image_rows": 15, "takes_any_image": False}, [8]),
        (52, {"image_rows": 31}, [None, 8]),
        (52, {"image_rows": 32}, [None, 12]),
        (1000, {}, [None, None]),
    ]
    for tokens, budget, expected in cases:
        queue = make_queue(PrefixCache(100, 4))
        queue.append(entry(b"a" * 32))
        queue.append(entry(b"b" * 32))
        assert [one.chunk_len for one in admitted(queue, tokens, **budget)] == expected, (tokens, budget)


def test_a_prompt_whose_next_token_is_of_an_image_beyond_the_budget_waits_behind_others() -> None:
    cache = PrefixCache(100, 4)
    prefix_of(cache, Entry(make_request("r", 9, 1, input_ids=(*range(100, 108), 1))))  # up to the image
    queue = make_queue(cache)
    first, second = entry(b"a" * 32), entry(b"b" * 32)
    queue.append(first)
    queue.append(second)
    assert admitted(queue, image_rows=31) == [first]
    assert admitted(queue, image_rows=15, takes_any_image=False) == [second]  # first in its step
    assert second.allocation is not None and (second.allocation.prefix_length, second.chunk_len) == (8, None)


def test_images_that_are_kept_with_a_state_take_room_besides_their_tokens() -> None:
    """40 tokens and 30 positions for the image: 18 blocks of 4. Two requests do not fit 35, and four images never."""
    cache = PrefixCache(36, 4)
    queue = RequestQueue(block_size=4, allocator=cache, image_reserve=30)
    first, second = entry(b"a" * 32), entry(b"b" * 32)
    queue.append(first)
    queue.append(second)
    assert admitted(queue) == [first]
    assert first.allocation is not None and len(first.allocation.blocks) == 18
    assert [queue.most_new_tokens(PROMPT, 1000, num_images=n) for n in (1, 3, 4)] == [71, 11, -19]
    cache.free(first.allocation, first.token_ids)
    assert admitted(queue) == [second]
