"""The end of a generated text in OpenAI's answers: why it ended, and the text without the stop that ended it."""

from __future__ import annotations

from collections.abc import Sequence

from router.events import FinishReason
from router.request import ValidRequest

FINISH_REASONS: dict[FinishReason, str] = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}
"""TGI's reasons in OpenAI's terms, which have none for a stop text."""


def stops_left_out(request: ValidRequest, *, keeps_stop: bool) -> tuple[str, ...]:
    """The stop texts that answers to a request do not show; none where the client wants to see them."""
    return () if keeps_stop else request.stopping.stop_sequences


class StopSearch:
    """Looks for the first end of a stop text in a text that comes in pieces.

    A piece costs the length of the stop texts.
    """

    def __init__(self, stops: Sequence[str], *, keeps_stop: bool = False) -> None:
        """`keeps_stop`: what is passed on ends behind the stop text, not before it."""
        self.found: str | None = None  # the stop text that has come
        self._stops = tuple(filter(None, stops))
        self._keeps_stop = keeps_stop
        self._held = ""

    def push(self, text: str, *, counts: bool = True) -> str:
        """What is certain to be said, after `text` has come. `counts`: a stop text that ends in it ends the text."""
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
        """What is left where the text ends, or something else follows it."""
        held, self._held = self._held, ""
        return held


class StopHoldBack:
    """Keeps back the end of a stream while it may still become a stop text. Cost per token: the length of the stops."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> str:
        """What is certain not to be part of a stop after `text` has come."""
        if not self._stops:
            return text
        held = self._held + text
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self, text: str, *, stopped: bool) -> str:
        """What is left to say after the last `text`; without the stop if it ended the generation."""
        rest = self._held + text
        self._held = ""
        if stopped:
            positions = [position for stop in self._stops if (position := rest.find(stop)) >= 0]
            return rest[: min(positions)] if positions else rest
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def ended_by_stop(text: str, stops: Sequence[str], reason: FinishReason) -> bool:
    """Whether a stop ended a finished text; one that the last allowed token completed is reported as `length`."""
    return reason == "stop_sequence" or (reason == "length" and text.endswith(tuple(stops)))


def without_stop(text: str, stops: Sequence[str], reason: FinishReason) -> str:
    """A finished text without the stop that ended it; the text was cut right after the match."""
    if not ended_by_stop(text, stops, reason):
        return text
    matches = [stop for stop in stops if stop and text.endswith(stop)]
    return text.removesuffix(max(matches, key=len)) if matches else text
