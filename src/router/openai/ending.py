"""How a chat ended, for APIs with other words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.events import Finished
from router.openai.stops import ended_by_stop


@dataclass(frozen=True, kw_only=True)
class Ending:
    """The chat route's `finish_reason`, the stop text, and token counts."""

    finish_reason: str
    stop: str | None
    output_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    service_tier: str = "default"


def stop_of(event: Finished, stops: Sequence[str]) -> str | None:
    """Return the stop text that ended an answer, if any."""
    if not ended_by_stop(event.text, stops, event.finish_reason):
        return None
    return max((stop for stop in stops if stop and event.text.endswith(stop)), key=len, default=None)
