"""What prompts are compared by: ids, or what replaces them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentRange:
    """Placeholders from `start` to `stop`, whose KV follows from `digest` (an image's pixels and size)."""

    start: int
    stop: int
    digest: bytes


def cache_keys(token_ids: Sequence[int], ranges: Sequence[ContentRange] = ()) -> list[int]:
    """Return a key per token: its id, or a negative one by digest within `ranges`."""
    keys = token_ids if isinstance(token_ids, list) else list(token_ids)
    for one in ranges:
        if one.start < len(keys):
            stop = min(one.stop, len(keys))
            # A 1 before the digest, so that leading zeros count.
            keys = [*keys[: one.start], *[-int.from_bytes(b"\x01" + one.digest)] * (stop - one.start), *keys[stop:]]
    return keys
