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
