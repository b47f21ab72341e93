"""What tokens are compared by: ids, and digests where ids are placeholders."""

from __future__ import annotations

import itertools

from router.scheduling.cache.keys import ContentRange, cache_keys


def test_ids_without_ranges_are_the_keys():
    ids = [1, 2, 3]
    assert cache_keys(ids) is ids
    assert cache_keys((1, 2, 3)) == ids


def test_a_range_replaces_its_ids_and_no_others():
    ids = [1, 0, 0, 2, 0, 0]
    keys = cache_keys(ids, [ContentRange(1, 3, b"A"), ContentRange(4, 6, b"B")])
    assert (keys[0], keys[3]) == (1, 2)
    assert keys[1] == keys[2] < 0 and keys[4] == keys[5] < 0 and keys[1] != keys[4]
    assert ids == [1, 0, 0, 2, 0, 0]


def test_ranges_end_where_the_tokens_do():
    ranges = [ContentRange(1, 4, b"A"), ContentRange(6, 8, b"B")]
    whole = cache_keys(list(range(10)), ranges)
    for length in range(10):
        assert cache_keys(tuple(range(length)), ranges) == whole[:length]


def test_no_digest_equals_another_nor_an_id():
    digests = [b"", b"\x00", b"\x00\x00", b"\x01", b"\x01\x00", b"\xff" * 32, b"\x00" + b"\xff" * 31]
    keys = [cache_keys([7], [ContentRange(0, 1, digest)])[0] for digest in digests]
    assert all(key < 0 for key in keys)
    assert all(left != right for left, right in itertools.combinations(keys, 2))
