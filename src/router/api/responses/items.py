"""A response's items: beginning, deltas, end."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from router.api.responses.conversation import encrypted
from router.api.responses.tools import custom_input, searched

Event = tuple[str, dict[str, Any]]


class OutputItem(Protocol):
    """An item being written; `fields` so far."""

    fields: dict[str, Any]

    def start(self) -> list[Event]: ...

    def push(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]: ...

    def end(self) -> list[Event]: ...


class TextItem:
    """A message or reasoning of one part."""

    def __init__(self, *, is_reasoning: bool, is_encrypted: bool = False) -> None:
        self._kind = "reasoning_text" if is_reasoning else "output_text"
        self._is_encrypted = is_encrypted
        self._part: dict[str, Any] = {"type": self._kind, "text": ""}
        if is_reasoning:
            self.fields: dict[str, Any] = {"id": _new_id("rs"), "type": "reasoning", "summary": [], "content": []}
        else:
            self._part |= {"annotations": [], "logprobs": []}
            self.fields = {"id": _new_id("msg"), "type": "message", "role": "assistant", "content": []}

    def start(self) -> list[Event]:
        part = copy.deepcopy(self._part)
        self.fields["content"] = [self._part]
        return [("content_part.added", {"content_index": 0, "part": part})]

    def push(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._part["text"] += text
        delta: dict[str, Any] = {"content_index": 0, "delta": text}
        if (kept := self._part.get("logprobs")) is not None:
            kept += logprobs
            delta["logprobs"] = list(logprobs)
        return [(f"{self._kind}.delta", delta)]

    def end(self) -> list[Event]:
        text = self._part["text"]
        if self._is_encrypted:
            self.fields["encrypted_content"] = encrypted(text)
        done = {"content_index": 0, "text": text}
        if "logprobs" in self._part:  # which openai's client requires beside text
            done["logprobs"] = list(self._part["logprobs"])
        return [
            (f"{self._kind}.done", done),
            ("content_part.done", {"content_index": 0, "part": dict(self._part)}),
        ]


class CallOutput:
    """A call of a function."""

    def __init__(self, name: str, call_id: str, namespace: str | None) -> None:
        self.fields = _call("fc", "function_call", call_id, namespace, name=name, arguments="")

    def start(self) -> list[Event]:
        return []

    def push(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self.fields["arguments"] += text
        return [("function_call_arguments.delta", {"delta": text})]

    def end(self) -> list[Event]:
        done = {"name": self.fields["name"], "arguments": self.fields["arguments"]}
        return [("function_call_arguments.done", done)]


class _WholeCall:
    """A call that says nothing before its arguments, which are JSON, have all come."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self._arguments, self.fields = "", fields

    def start(self) -> list[Event]:
        return []

    def push(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        self._arguments += text
        return []


class CustomCallOutput(_WholeCall):
    """A call of a custom tool."""

    def __init__(self, name: str, call_id: str, namespace: str | None) -> None:
        super().__init__(_call("ctc", "custom_tool_call", call_id, namespace, name=name, input=""))

    def end(self) -> list[Event]:
        text = self.fields["input"] = custom_input(self._arguments)
        return [("custom_tool_call_input.delta", {"delta": text}), ("custom_tool_call_input.done", {"input": text})]


class SearchOutput(_WholeCall):
    """A call of the client's search for tools, whose arguments are an object: it has no events of its own."""

    def __init__(self, call_id: str) -> None:
        super().__init__(_call("tsc", "tool_search_call", call_id, None, execution="client", arguments={}))

    def end(self) -> list[Event]:
        self.fields["arguments"] = searched(self._arguments)
        return []


def _call(prefix: str, kind: str, call_id: str, namespace: str | None, **own: Any) -> dict[str, Any]:
    fields = {"id": _new_id(prefix), "type": kind, "call_id": call_id, **own}
    return fields if namespace is None else fields | {"namespace": namespace}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
