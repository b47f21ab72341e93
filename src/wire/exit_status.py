"""Exit statuses that mean something to another process; any other than 0 is a failure of its own."""

from __future__ import annotations

LOST_PEER = 4
"""A shard that ended only because another one did: never the cause that the launcher names."""
STALLED = 5
"""A router that gave up because the shards finished no step: what they are doing is worth knowing."""
MISSING_PEER = 6
"""A shard that waited in vain for another one at the start."""
LOST_NODE = 7
"""A launcher that ended because another node of its group had failed, or was not heard from."""
