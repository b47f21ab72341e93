"""A text's end: its reason, and text without the stop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.events import FinishReason
from router.request import ValidRequest

FINISH_REASONS: dict[FinishReason, str] = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}
"""TGI's reasons in OpenAI's terms, which have none for a stop text."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a chat ended: the chat route's `finish_reason`, the stop text, and token counts."""

    finish_reason: str
    stop: str | None
    output_tokens: int
    reasoning_tokens: int
    cached_tokens: int = 0  # of the prompt, from the prefix cache
    service_tier: str = "default"


def stops_left_out(request: ValidRequest, *, keeps_stop: bool) -> tuple[str, ...]:
    """Return stop texts not shown, unless wanted."""
    return () if keeps_stop else request.stopping.stop_sequences


class StopSearch:
    """Finds the first stop text in pieces, at the stops' cost."""

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """Take the stops; `keeps_stop` passes them on."""
        self.found: str | None = None  # the stop text that has come
        self._stops = tuple(filter(None, stops))
        self._keeps_stop = keeps_stop
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> str:
        """Return certain text; `counts`: stops ending here count."""
        if not self._stops or self.found is not None:
            return "" if self.found is not None else text
        held = self._held + text
        first = len(self._held)
        starts = [(held.find(stop, max(0, first - len(stop) + 1)), stop) for stop in self._stops]
        ends = [(start + len(stop), -len(stop)) for start, stop in starts if start >= 0]
        if ends and counts:
            end, size = min(ends)
            self.found, self._held = held[end + size : end], ""
            return held[: end if self._keeps_stop else end + size]
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def end(self) -> str:
        """Return the rest at an end or change."""
        held, self._held = self._held, ""
        return held


class StopHoldBack:
    """Holds a stream's end that may become a stop."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> str:
        """Return text that is surely no stop."""
        if not self._stops:
            return text
        held = self._held + text
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self, text: str, *, stopped: bool) -> str:
        """Return the rest, without an ending stop."""
        rest = self._held + text
        self._held = ""
        if stopped:
            positions = [position for stop in self._stops if (position := rest.find(stop)) >= 0]
            return rest[: min(positions)] if positions else rest
        return rest


def _overlap(text: str, stop: str) -> int:
    """Return the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def ended_by_stop(text: str, stops: Sequence[str], reason: FinishReason) -> bool:
    """Whether a stop ended a text, even if reported as `length`."""
    return reason == "stop_sequence" or (reason == "length" and text.endswith(tuple(filter(None, stops))))


def openai_reason(text: str, request: ValidRequest, reason: FinishReason) -> FinishReason:
    """Return why a text ended: of a stop and the limit at once the stop, unlike in TGI."""
    return "stop_sequence" if ended_by_stop(text, request.stopping.stop_sequences, reason) else reason


def stop_of(text: str, stops: Sequence[str], reason: FinishReason) -> str | None:
    """Return the stop text that ended an answer, if any."""
    if not ended_by_stop(text, stops, reason):
        return None
    return max((stop for stop in stops if stop and text.endswith(stop)), key=len, default=None)


def without_stop(text: str, stops: Sequence[str], reason: FinishReason) -> str:
    """Drop the ending stop."""
    return text.removesuffix(stop_of(text, stops, reason) or "")
