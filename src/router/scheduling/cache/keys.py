"""What a prompt's tokens are compared by when KV is shared: their ids, or what takes their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ContentRange:
    """The tokens `start` to `stop` of a request are placeholders: their KV follows from `digest`, not from their ids.

    digest: of all that determines their KV, their number included (for an image its pixels and its size).
    """

    start: int
    stop: int
    digest: bytes


def cache_keys(token_ids: Sequence[int], ranges: Sequence[ContentRange] = ()) -> list[int]:
    """One key for each token: its id, within `ranges` (which do not overlap) a negative number made of the digest.

    Ranges may reach beyond `token_ids`. The argument itself is returned if it is a list already and has no ranges.
    """
    keys = token_ids if isinstance(token_ids, list) else list(token_ids)
    for one in ranges:
        if one.start < len(keys):
            stop = min(one.stop, len(keys))
            # A 1 before the digest, so that leading zeros count.
            keys = [*keys[: one.start], *[-int.from_bytes(b"\x01" + one.digest)] * (stop - one.start), *keys[stop:]]
    return keys
