"""All shards as one: every call goes to every rank, and the answers must agree. (Interface; the body follows.)"""

from __future__ import annotations


class ShardPool:
    """The ranks of one model."""

    async def close(self) -> None:
        """Close the channels."""
        raise NotImplementedError
