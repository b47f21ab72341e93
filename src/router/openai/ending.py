"""How the answer to one chat ended, for the APIs that say it in other words than the chat route."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.events import Finished
from router.openai.stops import ended_by_stop


@dataclass(frozen=True, kw_only=True)
class Ending:
    """`finish_reason` is the chat route's; `stop`: the stop text that ended the answer. The rest are tokens."""

    finish_reason: str
    stop: str | None
    output_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0  # of the prompt, from the prefix cache


def stop_of(event: Finished, stops: Sequence[str]) -> str | None:
    """The stop text that ended an answer; None: something else did."""
    if not ended_by_stop(event.text, stops, event.finish_reason):
        return None
    return max((stop for stop in stops if stop and event.text.endswith(stop)), key=len, default=None)
