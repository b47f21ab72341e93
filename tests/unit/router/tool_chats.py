"""Chats with tools: bodies, scripts of generations that call one or none, and the deltas of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from router_fakes import says

from router.events import Event
from router.request import ValidRequest

PATH = "/v1/chat/completions"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "Weather", "parameters": PARAMETERS}}
OTHER = {"type": "function", "function": {"name": "get_time"}}
CALL = ['{"', "function", '": {"_name', '": "get_', 'weather"', ', "ci', 'ty": "Par', 'is", "n": 3', "}", "}", "</s>"]
NO_TOOL = ['{"function": {"_name": "', "no_", 'tool"', "}}", "</s>"]
ARGUMENTS = '{"city":"Paris","n":3}'


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hello"}], "tools": [TOOL, OTHER]} | fields


def script(*passes: Sequence[str]) -> Callable[[ValidRequest], list[Event]]:
    """Pieces of the constrained pass, then of the one in words; each ends with a special token."""
    left = list(passes)
    return lambda request: says(*left.pop(0), reason="eos_token", last_special=True)


def deltas(events: list[Any]) -> list[Any]:
    return [event["choices"][0]["delta"] for event in events if event != "[DONE]" and event["choices"]]


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f"} | fields}
