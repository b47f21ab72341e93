"""One choice of a chat whose answer may hold reasoning and calls, from its tokens to messages and deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.events import FinishReason, Token
from router.openai.formats.events import Arguments, CallEnded, CallStarted, ChatEvent, Content, Reasoning
from router.openai.formats.format import IdKind
from router.openai.formats.reader import AnswerReader
from router.openai.stops import FINISH_REASONS, StopHoldBack, ended_by_stop


class ChoiceReader:
    """Reads the tokens of one choice; counts those of its reasoning."""

    def __init__(
        self,
        reader: AnswerReader,
        stops: Sequence[str],
        *,
        max_calls: int | None = None,
        hides_reasoning: bool = False,
    ) -> None:
        """`max_calls`: calls behind that many are left out. `hides_reasoning`: it is counted, not told."""
        self.reasoning_tokens = 0
        self._reader = reader
        self._stops = stops
        self._hold_back = StopHoldBack(stops)
        self._max_calls = max_calls
        self._num_calls = 0
        self._hides_reasoning = hides_reasoning

    def push(self, token: Token) -> list[ChatEvent]:
        """What a token brings that is not the last."""
        was_reasoning = self._reader.is_reasoning
        events = self._reader.read(self._hold_back.push(self._reader.text_of(token)))
        self.reasoning_tokens += was_reasoning or self._reader.is_reasoning
        return self._allowed(events)

    def finish(self, token: Token, text: str, reason: FinishReason) -> list[ChatEvent]:
        """What the last token brings; `text` is the whole answer."""
        was_reasoning = self._reader.is_reasoning
        stopped = ended_by_stop(text, self._stops, reason)
        rest = self._hold_back.finish(self._reader.text_of(token), stopped=stopped)
        events = self._reader.read(rest)
        self.reasoning_tokens += was_reasoning or self._reader.is_reasoning
        return self._allowed(events + self._reader.end())

    def finish_reason(self, reason: FinishReason) -> str:
        """In OpenAI's terms: calls are the reason where the model ended its answer itself."""
        if reason == "eos_token" and self._reader.num_complete_calls:
            return "tool_calls"
        return FINISH_REASONS[reason]

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


class CallIds:
    """The ids of an answer's calls, in the form that the model's template accepts."""

    def __init__(self, kind: IdKind, num_earlier: int) -> None:
        """`num_earlier`: calls of the chat before this answer."""
        self._kind = kind
        self._number = num_earlier

    def next(self, call: CallStarted) -> str:
        new = self._kind.new(call.name, self._number)
        self._number += 1
        return call.own_id if call.own_id is not None and self._kind.accepts(call.own_id) else new


def message(events: Sequence[ChatEvent], ids: CallIds) -> dict[str, Any]:
    """The message of a whole answer. `content` is null where there is only something else."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, CallStarted):
            function = {"description": None, "name": event.name, "arguments": ""}
            calls.append({"id": ids.next(event), "type": "function", "function": function})
        elif isinstance(event, Arguments):
            calls[-1]["function"]["arguments"] += event.text
    fields: dict[str, Any] = {"role": "assistant", "content": content or (None if calls or reasoning else "")}
    if reasoning:
        fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return fields | {"tool_calls": calls} if calls else fields


class Deltas:
    """The deltas of a stream. Neighbouring events of one kind are one delta."""

    def __init__(self, ids: CallIds) -> None:
        self._ids = ids
        self._index = -1

    def of(self, events: Sequence[ChatEvent]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, Content):
                deltas.append({"content": event.text})
            elif isinstance(event, Reasoning):
                deltas.append({"reasoning": event.text, "reasoning_content": event.text})
            elif isinstance(event, CallStarted):
                self._index += 1
                function = {"name": event.name, "arguments": ""}
                call = {"index": self._index, "id": self._ids.next(event), "type": "function", "function": function}
                deltas.append({"tool_calls": [call]})
            elif isinstance(event, Arguments):
                deltas.append({"tool_calls": [{"index": self._index, "function": {"arguments": event.text}}]})
        return deltas
