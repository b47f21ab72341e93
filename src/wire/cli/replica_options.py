"""How a replica is chosen for a request: the option of launcher and router."""

from __future__ import annotations

from typing import Literal

ReplicaPolicy = Literal["prefix", "least", "round_robin"]
REPLICA_POLICY = (
    "Which replica gets a request: `prefix` where the least is to be done for it, what its prefix cache has left out; "
    "`least` the same without the cache; `round_robin` the next in turn."
)
