"""What an answer turns out to say, in the order of the answer: reasoning, content, calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Reasoning:
    """More of the text behind which the answer begins."""

    text: str


@dataclass(slots=True)
class Content:
    """More of the visible answer."""

    text: str


@dataclass(slots=True)
class CallStarted:
    """The name is complete. `own_id`: the id that the model wrote, if its format has one."""

    name: str
    own_id: str | None = None


@dataclass(slots=True)
class Arguments:
    """More of the JSON text of the call that started last."""

    text: str


@dataclass(slots=True)
class CallEnded:
    """`is_complete`: its arguments are a whole JSON value."""

    is_complete: bool


ChatEvent = Reasoning | Content | CallStarted | Arguments | CallEnded
