"""How long the launcher waits for its children."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """In seconds."""

    graceful_s: float
    """From a signal to the end of everything."""
    startup_s: float | None = None
    shards_s: float = 10.0
    """Shards have no work left when they are asked to stop."""
    survivors_s: float = 2.0
    """Shards that wait in a collective for one that has exited never answer: a long wait gains nothing."""
    failing_router_s: float = 5.0
    """For the router to tell its clients."""
    download_s: float = 10.0
    waiting_record_s: float = 10.0
    draining_record_s: float = 5.0
