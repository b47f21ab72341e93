"""From generations under the tool grammar to OpenAI's calls."""

from __future__ import annotations

import uuid
from typing import Any

from router.answers.stops import FINISH_REASONS, StopHoldBack, ended_by_stop, openai_reason, stops_left_out
from router.answers.tgi_form.call_parser import ToolCallParser
from router.api.chat.chunks import ChatHead
from router.api.openai.logprobs import TokenNames, chat_logprob
from router.errors import ToolError
from router.events import Finished, FinishReason, TokenGenerated
from router.request import ValidRequest

_MAX_QUOTED = 200


def call_message(text: str, reason: FinishReason, only_name: str | None) -> tuple[dict[str, Any], str]:
    """Return the message and finish reason; a cut call has its arguments so far.

    Args:
        only_name: The function, if without choice.
    """
    parser = ToolCallParser()
    arguments = parser.feed(text)
    finish_reason = _finish_reason(parser, reason, text)
    message: dict[str, Any] = {"role": "assistant", "content": None}
    name = parser.name or only_name
    if name is not None:
        function = {"description": None, "name": name, "arguments": arguments}
        message["tool_calls"] = [{"id": _new_id(), "type": "function", "function": function}]
    return message, finish_reason


def _finish_reason(parser: ToolCallParser, reason: FinishReason, text: str) -> str:
    if parser.is_complete:
        return "tool_calls"
    if parser.is_malformed or reason == "eos_token":
        raise ToolError(f"the model has generated no tool call: {text[:_MAX_QUOTED]}")
    return FINISH_REASONS[reason]


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class CallStream:
    """A choice that calls: id and name, arguments, finish reason."""

    def __init__(
        self,
        head: ChatHead,
        index: int,
        request: ValidRequest,
        *,
        keeps_stop: bool,
        logprobs: TokenNames | None,
        only_name: str | None,
    ) -> None:
        self._head = head.fields("chat.completion.chunk")
        self._index = index
        self._only_name = only_name
        self._request = request
        self._stops = stops_left_out(request, keeps_stop=keeps_stop)
        self._hold_back = StopHoldBack(self._stops)
        self._parser = ToolCallParser()
        self._text = ""  # until the first chunk is sent, for the error if there is no call
        # Of tokens that no chunk has carried yet: those of the next one take them along.
        self._names = logprobs
        self._logprobs: list[dict[str, Any]] = []
        self._has_begun = False

    def chunks(self, event: TokenGenerated | Finished) -> list[dict[str, Any]]:
        """Return a token's chunks."""
        token, is_last = event.token, isinstance(event, Finished)
        if self._names is not None:
            self._logprobs.append(chat_logprob(self._names, token, event.top_tokens))
        text = "" if token.special else token.text
        if isinstance(event, Finished):
            stopped = ended_by_stop(event.text, self._stops, event.finish_reason)
            text = self._hold_back.finish(text, stopped=stopped)
        else:
            text = self._hold_back.push(text)
        arguments = self._parser.feed(text)
        chunks = []
        if not self._has_begun:
            self._text += text
            name = self._parser.name or (self._only_name if is_last else None)
            if name is not None or is_last:
                chunks.append(self._first(name))
        if arguments:
            chunks.append(self._chunk({"tool_calls": [{"index": 0, "function": {"arguments": arguments}}]}))
        if isinstance(event, Finished):
            reason = _finish_reason(
                self._parser, openai_reason(event.text, self._request, event.finish_reason), self._text
            )
            chunks.append(self._chunk({}, reason))
        return chunks

    def _first(self, name: str | None) -> dict[str, Any]:
        self._has_begun = True
        delta: dict[str, Any] = {"role": "assistant", "content": None}
        if name is not None:
            function = {"name": name, "arguments": ""}
            delta["tool_calls"] = [{"index": 0, "id": _new_id(), "type": "function", "function": function}]
        return self._chunk(delta)

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        logprobs = None
        if self._names is not None:
            logprobs, self._logprobs = {"content": self._logprobs, "refusal": None}, []
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], "usage": None}
