"""The cache of prepared images, and the memory of all that are alive."""

from __future__ import annotations

import gc

import pytest

from router.errors import OverloadedError
from router.images.store import ImageStore
from wire.images.prepared import Feature, PreparedImage


def image(number: int, size: int = 100) -> PreparedImage:
    return PreparedImage(bytes([number]), "", 1, None, {"pixel_values": Feature("bool", (size,), bytes(size))})


def test_the_least_recently_used_goes_first() -> None:
    store = ImageStore(cache_bytes=250, memory_bytes=1000)
    store.add(image(1))
    store.add(image(2))
    assert store.find(b"\x01") is not None
    store.add(image(3))
    gc.collect()
    assert store.find(b"\x02") is None and store.find(b"\x01") is not None and store.find(b"\x03") is not None
    assert store.num_bytes == store.num_cached_bytes == 200


def test_what_a_request_holds_is_found_without_a_cache_and_counted_until_its_end() -> None:
    store = ImageStore(cache_bytes=0, memory_bytes=250)
    held = store.add(image(1))
    assert store.find(b"\x01") is held
    assert store.add(image(1)) is held and store.num_bytes == 100
    del held
    gc.collect()
    assert store.find(b"\x01") is None and store.num_bytes == 0


def test_the_cache_makes_room_for_requests_and_they_are_refused_beyond_the_memory() -> None:
    store = ImageStore(cache_bytes=250, memory_bytes=300)
    held = [store.add(image(1)), store.add(image(2))]
    store.add(image(3))
    gc.collect()
    held.append(store.add(image(4)))  # in the place of 3
    assert store.num_bytes == 300 and store.find(b"\x03") is None
    with pytest.raises(OverloadedError):
        store.add(image(5))
    assert store.num_bytes == 300
    held.clear()
    store.add(image(6))
    store.check_memory()
