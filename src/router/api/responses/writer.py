"""From chat deltas to the Responses API's items and events."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from router.answers.stops import Ending
from router.api.responses.input_items import ENCRYPTED
from router.api.responses.items import CallOutput, CustomCallOutput, Event, OutputItem, SearchOutput, TextItem
from router.api.responses.schema import ResponsesBody
from router.api.responses.tools import ServedTools

Keep = Callable[[dict[str, Any]], None]
_NONE: Mapping[str, float] = {}


class ResponseWriter:
    """Writes one response, one open item at a time."""

    def __init__(
        self,
        body: ResponsesBody,
        tools: ServedTools,
        model: str,
        keep: Keep | None = None,
        *,
        defaults: Mapping[str, float] = _NONE,
    ) -> None:
        """Take the body.

        Args:
            keep: Gets the response when it has ended, before the client learns of its end.
            defaults: What counts in fields of sampling that the body leaves open.
        """
        self._tools = tools
        self._keep = keep
        self._is_encrypted = ENCRYPTED in body.include
        self._fields = _fields(body, model, defaults, is_stored=keep is not None) | _echoed(body, tools)
        self._output: list[dict[str, Any]] = []
        self._open: OutputItem | None = None
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not written yet
        self._input_tokens = 0
        self._num_events = 0

    @property
    def whole(self) -> dict[str, Any]:
        return {**self._fields, "output": self._output}

    def start(self, input_tokens: int) -> list[Event]:
        self._input_tokens = input_tokens
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def push(self, delta: dict[str, Any], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Return a delta's events; `logprobs`: of the tokens since the one before."""
        events: list[Event] = []
        self._logprobs += logprobs
        if text := delta.get("reasoning"):
            events += self._text(text, is_reasoning=True)
        if text := delta.get("content"):
            events += self._text(text, is_reasoning=False)
        if delta.get("reasoning") or "tool_calls" in delta:
            self._logprobs = []  # the API has those of texts only
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                events += self._start(self._call(call["function"]["name"], call["id"]))
            if arguments := call["function"]["arguments"]:
                assert self._open is not None
                events += self._placed(self._open.push(arguments))
        return events

    def end(self, ending: Ending) -> list[Event]:
        is_cut = ending.finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        events = self._close(status)
        self._fields |= {"status": status, "usage": self._usage(ending)}
        if "service_tier" in self._fields:
            self._fields["service_tier"] = ending.service_tier
        if is_cut:
            self._fields["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self._fields["completed_at"] = int(time.time())
        if self._keep is not None:
            self._keep(self.whole)
        return [*events, self._lifecycle(status)]

    def fail(self, body: dict[str, Any]) -> list[Event]:
        """End a stream with the API's error `body` and the response."""
        error = body["error"]
        events = self._close("incomplete")
        self._fields |= {"status": "failed", "error": {"code": "server_error", "message": error["message"]}}
        shown = {"code": error["code"], "message": error["message"], "param": error["param"]}
        return [*events, self._numbered("error", shown), self._lifecycle("failed")]

    def _text(self, text: str, *, is_reasoning: bool) -> list[Event]:
        kind, events = "reasoning" if is_reasoning else "message", []
        if self._open is None or self._open.fields["type"] != kind:
            item = TextItem(is_reasoning=is_reasoning, is_encrypted=is_reasoning and self._is_encrypted)
            events = self._start(item)
        assert self._open is not None
        logprobs, self._logprobs = ((), self._logprobs) if is_reasoning else (self._logprobs, [])
        return [*events, *self._placed(self._open.push(text, logprobs))]

    def _call(self, name: str, call_id: str) -> OutputItem:
        namespace, inner = self._tools.namespaced.get(name, (None, name))
        if name in self._tools.custom:
            return CustomCallOutput(inner, call_id, namespace)
        if name == self._tools.search:
            return SearchOutput(call_id)
        return CallOutput(inner, call_id, namespace)

    def _start(self, item: OutputItem) -> list[Event]:
        events = self._close("completed")
        self._open = item
        item.fields["status"] = "in_progress"
        self._output.append(item.fields)
        added = {"output_index": len(self._output) - 1, "item": copy.deepcopy(item.fields)}
        return [*events, self._numbered("response.output_item.added", added), *self._placed(item.start())]

    def _close(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        item = self._open
        events = self._placed(item.end())
        self._open = None
        item.fields["status"] = status
        done = {"output_index": len(self._output) - 1, "item": copy.deepcopy(item.fields)}
        return [*events, self._numbered("response.output_item.done", done)]

    def _placed(self, events: list[Event]) -> list[Event]:
        """Add the open item's place."""
        assert self._open is not None
        place = {"item_id": self._open.fields["id"], "output_index": len(self._output) - 1}
        return [self._numbered(f"response.{name}", place | data) for name, data in events]

    def _lifecycle(self, name: str) -> Event:
        whole = {**self._fields, "output": copy.deepcopy(self._output)}
        return self._numbered(f"response.{name}", {"response": whole})

    def _numbered(self, name: str, data: dict[str, Any]) -> Event:
        number, self._num_events = self._num_events, self._num_events + 1
        return name, {"type": name, "sequence_number": number, **data}

    def _usage(self, ending: Ending) -> dict[str, Any]:
        return {
            "input_tokens": self._input_tokens,
            "input_tokens_details": {"cached_tokens": ending.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": ending.output_tokens,
            "output_tokens_details": {"reasoning_tokens": ending.reasoning_tokens},
            "total_tokens": self._input_tokens + ending.output_tokens,
        }


def _fields(body: ResponsesBody, model: str, defaults: Mapping[str, float], *, is_stored: bool) -> dict[str, Any]:
    """Return the required fields before the first item, without `_echoed`."""
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "max_output_tokens": body.max_output_tokens,
        "model": model,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort, "summary": None},
        **({} if body.service_tier is None else {"service_tier": body.service_tier}),
        "store": is_stored,
        "temperature": _in_force(body.temperature, defaults.get("temperature")),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": _in_force(body.top_p, defaults.get("top_p")),
        "truncation": "disabled",
        "usage": None,
    }


def _in_force(*values: float | None) -> float:
    """Return the first value that is given."""
    return next((value for value in values if value is not None), 1.0)


def _echoed(body: ResponsesBody, tools: ServedTools) -> dict[str, orjson.Fragment]:
    """Return large echoed fields, made JSON once."""
    form = body.text.format
    echoed = {
        "instructions": body.instructions,
        "metadata": body.metadata,
        "text": {"format": form.model_dump(by_alias=True, exclude_unset=True) | {"type": form.type}},
        "tool_choice": body.tool_choice,
        "tools": tools.echoed,
    }
    return {name: orjson.Fragment(orjson.dumps(value)) for name, value in echoed.items()}
