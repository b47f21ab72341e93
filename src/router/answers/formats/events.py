"""What an answer says, in order: reasoning, content, calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Reasoning:
    """More reasoning text."""

    text: str


@dataclass(slots=True)
class Content:
    """More of the visible answer."""

    text: str


@dataclass(slots=True)
class CallStarted:
    """The name is complete, with the model's `own_id`, if any."""

    name: str
    own_id: str | None = None


@dataclass(slots=True)
class Arguments:
    """More JSON of the last call."""

    text: str


@dataclass(slots=True)
class CallEnded:
    """`is_complete`: the arguments are whole."""

    is_complete: bool


ChatEvent = Reasoning | Content | CallStarted | Arguments | CallEnded
