"""From events to chunks of OpenAI's streams, in TGI's key order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router.answers.stops import FINISH_REASONS, StopHoldBack, ended_by_stop, openai_reason, stops_left_out
from router.api.openai.answers import AnswerHead, usage
from router.api.openai.logprobs import TokenNames, chat_logprob
from router.events import Finished, Predicted, TokenGenerated
from router.request import ValidRequest


class ChatHead(AnswerHead):
    """A chat's head, in TGI's key order."""

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "object": kind,
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
            **self._tier(),
        }


class ChoiceStream:
    """One choice: a chunk a token, the role first only."""

    def __init__(
        self, head: ChatHead, index: int, request: ValidRequest, *, keeps_stop: bool, logprobs: TokenNames | None
    ) -> None:
        self._head = head.fields("chat.completion.chunk")
        self._index = index
        self._request = request
        self._stops = stops_left_out(request, keeps_stop=keeps_stop)
        self._hold_back = StopHoldBack(self._stops)
        self._logprobs = logprobs
        self._is_first = True

    def chunks(self, event: TokenGenerated | Finished) -> list[dict[str, Any]]:
        """Return a token's chunk; special ones say nothing."""
        token = event.token
        text = "" if token.special else token.text
        reason = None
        if isinstance(event, Finished):
            reason = FINISH_REASONS[openai_reason(event.text, self._request, event.finish_reason)]
            text = self._hold_back.finish(text, stopped=ended_by_stop(event.text, self._stops, event.finish_reason))
        else:
            text = self._hold_back.push(text)
        delta = {"role": "assistant", "content": text} if self._is_first else {"content": text}
        self._is_first = False
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": {"content": [chat_logprob(self._logprobs, token, event.top_tokens)], "refusal": None}
            if self._logprobs
            else None,
            "finish_reason": reason,
        }
        return [{**self._head, "choices": [choice], "usage": None}]


def usage_chunk(
    head: ChatHead,
    prompt_tokens: int,
    completion_tokens: int,
    reasoning_tokens: int | None,
    cached_tokens: int,
    predicted: Sequence[Predicted | None],
) -> dict[str, Any]:
    used = usage(prompt_tokens, completion_tokens, reasoning_tokens, cached_tokens=cached_tokens, predicted=predicted)
    return head.fields("chat.completion.chunk") | {"choices": [], "usage": used}
