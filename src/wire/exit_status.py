"""Exit statuses that mean something to another process; any other than 0 is a failure of its own."""

from __future__ import annotations

LOST_PEER = 4
"""A shard that ended only because another one did: never the cause that the launcher names."""
