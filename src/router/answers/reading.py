"""From a choice's tokens to messages and deltas, with reasoning and calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.answers.formats.events import Arguments, CallEnded, CallStarted, ChatEvent, Content, Reasoning
from router.answers.formats.format import IdKind
from router.answers.formats.reader import AnswerReader, merged
from router.answers.stops import FINISH_REASONS, StopSearch
from router.events import FinishReason, Token


class ChoiceReader:
    """Reads a choice, counting reasoning; stop texts are sought in text and arguments."""

    def __init__(
        self,
        reader: AnswerReader,
        stops: Sequence[str],
        *,
        keeps_stop: bool = False,
        min_tokens: int = 0,
        max_calls: int | None = None,
        hides_reasoning: bool = False,
    ) -> None:
        """Start with nothing read.

        Args:
            keeps_stop: The answer ends behind the stop text.
            min_tokens: Before which stop texts do not count.
            max_calls: Further ones are left out.
            hides_reasoning: It is only counted.
        """
        self.reasoning_tokens = 0
        self._reader = reader
        self._stops = StopSearch(stops, keeps_stop=keeps_stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._searched: type[Content] | type[Arguments] = Content  # the kind of text that the search is in
        self._max_calls = max_calls
        self._num_calls = 0
        self._hides_reasoning = hides_reasoning

    @property
    def stop(self) -> str | None:
        """Return the stop text that ended it."""
        return self._stops.found

    def push(self, token: Token) -> list[ChatEvent]:
        """Read a token that is not the last."""
        was_reasoning = self._reader.is_reasoning
        self._num_tokens += 1
        events = self._reader.read(self._reader.text_of(token))
        self.reasoning_tokens += was_reasoning or self._reader.is_reasoning
        return merged(self._searched_for_stops(self._allowed(events)))

    def finish(self, token: Token) -> list[ChatEvent]:
        """What the last token brings."""
        events = self.push(token)
        if self.stop is None:
            events += self._searched_for_stops(self._allowed(self._reader.end())) + self._held()
        return merged(events)

    def finish_reason(self, reason: FinishReason) -> str:
        """Return OpenAI's reason: calls, if the model ended itself."""
        if reason == "eos_token" and self._reader.num_complete_calls:
            return "tool_calls"
        return FINISH_REASONS[reason if self.stop is None else "stop_sequence"]

    def _allowed(self, events: list[ChatEvent]) -> list[ChatEvent]:
        if self._hides_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if self._max_calls is None:
            return events
        allowed = []
        for event in events:
            if self._num_calls < self._max_calls or isinstance(event, Content | Reasoning):
                allowed.append(event)
            self._num_calls += isinstance(event, CallEnded)
        return allowed

    def _searched_for_stops(self, events: list[ChatEvent]) -> list[ChatEvent]:
        """Return events up to a stop text, holding possible beginnings."""
        passed: list[ChatEvent] = []
        counts = self._num_tokens > self._min_tokens
        for event in events:
            if self.stop is not None:
                break
            if type(event) is not self._searched:
                passed += self._held()
            if not isinstance(event, Content | Arguments):
                passed.append(event)
                continue
            self._searched = type(event)
            if text := self._stops.push(event.text, counts=counts):
                passed.append(self._searched(text))
        return passed

    def _held(self) -> list[ChatEvent]:
        text = self._stops.end()
        return [self._searched(text)] if text else []


class CallIds:
    """Call ids that the model's template accepts."""

    def __init__(self, kind: IdKind, num_earlier: int) -> None:
        self._kind = kind
        self._number = num_earlier

    def next(self, call: CallStarted) -> str:
        new = self._kind.new(call.name, self._number)
        self._number += 1
        return call.own_id if call.own_id is not None and self._kind.accepts(call.own_id) else new


class Joints:
    """Puts text behind calls or reasoning on a new line."""

    def __init__(self) -> None:
        self._ends: dict[type[ChatEvent], str] = {}  # the last character of each kind of text
        self._last: type[ChatEvent] | None = None

    def text_of(self, event: Content | Reasoning) -> str:
        """Return the text with its joint."""
        kind = type(event)
        end = self._ends.get(kind, "\n")
        is_apart = self._last is kind or end.isspace() or event.text[:1].isspace()
        self._last, self._ends[kind] = kind, event.text[-1:] or end
        return event.text if is_apart else "\n" + event.text

    def other(self) -> None:
        """Something came that is not text."""
        self._last = None


def message(events: Sequence[ChatEvent], ids: CallIds) -> dict[str, Any]:
    """Return a whole answer's message; `content` null if only others."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    joints = Joints()
    for event in events:
        if isinstance(event, Content):
            content += joints.text_of(event)
            continue
        if isinstance(event, Reasoning):
            reasoning += joints.text_of(event)
            continue
        joints.other()
        if isinstance(event, CallEnded):
            continue
        if isinstance(event, CallStarted):
            function = {"description": None, "name": event.name, "arguments": ""}
            calls.append({"id": ids.next(event), "type": "function", "function": function})
        else:
            calls[-1]["function"]["arguments"] += event.text
    fields: dict[str, Any] = {"role": "assistant", "content": content or (None if calls or reasoning else "")}
    if reasoning:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return fields | {"tool_calls": calls} if calls else fields


class Deltas:
    """A stream's deltas, joining adjacent events of one kind."""

    def __init__(self, ids: CallIds, *, are_joined: bool = True) -> None:
        """Take whether the client joins all texts of a kind."""
        self._ids = ids
        self._index = -1
        self._joints = Joints() if are_joined else None

    def of(self, events: Sequence[ChatEvent]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Content | Reasoning):
                text = event.text if self._joints is None else self._joints.text_of(event)
                names = ("content",) if isinstance(event, Content) else ("reasoning", "reasoning_content")
                deltas.append(dict.fromkeys(names, text))
                continue
            if self._joints is not None:
                self._joints.other()
            if isinstance(event, CallStarted):
                self._index += 1
                function = {"name": event.name, "arguments": ""}
                call = {"index": self._index, "id": self._ids.next(event), "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            elif isinstance(event, Arguments):
                deltas.append({"tool_calls": [{"index": self._index, "function": {"arguments": event.text}}]})
        return deltas
