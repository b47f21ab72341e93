"""From chat deltas to the Messages API's blocks and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from router.answers.stops import Ending

Event = tuple[str, dict[str, Any]]

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_ABSENT = {"container": None, "stop_details": None}
_ABSENT_USAGE = {"cache_creation": None, "inference_geo": None, "server_tool_use": None, "service_tier": "standard"}
"""What the API says of its own servers."""
_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},  # the field must be there, and only Anthropic's servers can sign
}


class MessageWriter:
    """Writes one message, one open block at a time.

    Args:
        applied: The edits of its conversation, if any were asked for.
        shows_thinking: Blocks of thinking have their text.
    """

    def __init__(
        self, message_id: str, model: str, applied: list[dict[str, Any]] | None = None, *, shows_thinking: bool = True
    ) -> None:
        self._shows_thinking = shows_thinking
        self._managed = {} if applied is None else {"context_management": {"applied_edits": applied}}
        self._fields = {"id": message_id, "type": "message", "role": "assistant", "model": model}
        self._blocks: list[dict[str, Any]] = []
        self._arguments = ""  # of the open block, if it is a call
        self._is_open = False
        self._usage: dict[str, Any] = {}
        self._ended: dict[str, Any] = {"stop_reason": None, "stop_sequence": None, **_ABSENT}

    @property
    def whole(self) -> dict[str, Any]:
        return {**self._fields, "content": self._blocks, **self._ended, "usage": self._usage, **self._managed}

    def start(self, input_tokens: int) -> list[Event]:
        self._usage = {"input_tokens": input_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        self._usage |= {"output_tokens": 0, **_ABSENT_USAGE}
        started = self.whole | {"content": [], "usage": dict(self._usage)}
        return [_event("message_start", message=started), _event("ping")]

    def push(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Return a delta's events; this API has no logprobs."""
        events: list[Event] = []
        if text := delta.get("reasoning"):
            events += self._text("thinking", text)
        if text := delta.get("content"):
            events += self._text("text", text)
        for call in delta.get("tool_calls", ()):
            events += self._call(call)
        return events

    def end(self, ending: Ending) -> list[Event]:
        events = self._close()
        reason = "stop_sequence" if ending.stop is not None else _STOP_REASONS[ending.finish_reason]
        self._ended = {"stop_reason": reason, "stop_sequence": ending.stop, **_ABSENT}
        self._usage["output_tokens"] = ending.output_tokens
        self._usage["input_tokens"] -= ending.cached_tokens
        self._usage["cache_read_input_tokens"] = ending.cached_tokens
        return [
            *events,
            _event("message_delta", delta=self._ended, usage=self._usage, **self._managed),
            _event("message_stop"),
        ]

    def fail(self, body: dict[str, Any]) -> list[Event]:
        """End a stream with the API's error `body`."""
        return [("error", body)]

    def _text(self, kind: str, text: str) -> list[Event]:
        events = []
        if not self._is_open or self._blocks[-1]["type"] != kind:
            events = self._open({"type": kind, **_EMPTY[kind]})
        if kind == "thinking" and not self._shows_thinking:
            return events
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, call: dict[str, Any]) -> list[Event]:
        events = []
        if "id" in call:
            events = self._open(
                {"type": "tool_use", "id": _tool_id(call["id"]), "name": call["function"]["name"], "input": {}}
            )
        if arguments := call["function"]["arguments"]:
            self._arguments += arguments
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def _open(self, block: dict[str, Any]) -> list[Event]:
        events = self._close()
        self._blocks.append(block)
        self._is_open = True
        return [*events, _event("content_block_start", index=len(self._blocks) - 1, content_block=dict(block))]

    def _close(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        events, kind = [], self._blocks[-1]["type"]
        if kind == "tool_use":
            self._blocks[-1]["input"], self._arguments = _input(self._arguments), ""
        elif kind == "thinking":
            events.append(self._delta({"type": "signature_delta", "signature": self._blocks[-1]["signature"]}))
        return [*events, _event("content_block_stop", index=len(self._blocks) - 1)]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return _event("content_block_delta", index=len(self._blocks) - 1, delta=delta)


def _event(kind: str, **fields: Any) -> Event:
    return kind, {"type": kind, **fields}


def _tool_id(call_id: str) -> str:
    """Begin as Anthropic's ids, unless the model's format has ids of its own."""
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments as an object; empty if cut."""
    try:
        parsed = orjson.loads(arguments)
    except orjson.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
