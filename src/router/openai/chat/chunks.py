"""From the events of a generation to the chunks of OpenAI's chat streams: text without the stop, usage, logprobs.

Dictionaries with the key order of TGI; `router.api.http.json_out` writes them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from router.events import Finished, FinishReason, Token, TokenGenerated

# Also for the tokens of a finished stop text; OpenAI's clients know no other words.
FINISH_REASONS: dict[FinishReason, str] = {"eos_token": "stop", "stop_sequence": "stop", "length": "length"}


class StopHoldBack:
    """Keeps back the end of a stream while it may still become a stop text. Cost per token: the length of the stops."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> str:
        """What is certain not to be part of a stop after `text` has come."""
        if not self._stops:
            return text
        held = self._held + text
        keep = max(_overlap(held, stop) for stop in self._stops)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self, text: str, *, stopped: bool) -> str:
        """What is left to say after the last `text`; without the stop if it ended the generation."""
        rest = self._held + text
        self._held = ""
        if stopped:
            positions = [position for stop in self._stops if (position := rest.find(stop)) >= 0]
            return rest[: min(positions)] if positions else rest
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def ended_by_stop(text: str, stops: Sequence[str], reason: FinishReason) -> bool:
    """Whether a stop ended a finished text; one that the last allowed token completed is reported as `length`."""
    return reason == "stop_sequence" or (reason == "length" and text.endswith(tuple(stops)))


def without_stop(text: str, stops: Sequence[str], reason: FinishReason) -> str:
    """A finished text without the stop that ended it; the text was cut right after the match."""
    if not ended_by_stop(text, stops, reason):
        return text
    matches = [stop for stop in stops if stop and text.endswith(stop)]
    return text.removesuffix(max(matches, key=len)) if matches else text


@dataclass(frozen=True, kw_only=True)
class ChatHead:
    """What every chunk of a stream repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    def fields(self, kind: str) -> dict[str, Any]:
        return {
            "object": kind,
            "id": self.id,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class ChoiceStream:
    """One choice of a chat stream: one chunk per token, the role in the first only."""

    def __init__(self, head: ChatHead, index: int, stops: Sequence[str], *, logprobs: bool) -> None:
        self._head = head.fields("chat.completion.chunk")
        self._index = index
        self._stops = stops
        self._hold_back = StopHoldBack(stops)
        self._logprobs = logprobs
        self._is_first = True

    def chunks(self, event: TokenGenerated | Finished) -> list[dict[str, Any]]:
        """One chunk for one token; special tokens say nothing."""
        token = event.token
        text = "" if token.special else token.text
        reason = None
        if isinstance(event, Finished):
            reason = FINISH_REASONS[event.finish_reason]
            text = self._hold_back.finish(text, stopped=ended_by_stop(event.text, self._stops, event.finish_reason))
        else:
            text = self._hold_back.push(text)
        delta = {"role": "assistant", "content": text} if self._is_first else {"content": text}
        self._is_first = False
        choice = {
            "index": self._index,
            "delta": delta,
            "logprobs": {"content": [logprob(token, event.top_tokens)]} if self._logprobs else None,
            "finish_reason": reason,
        }
        return [{**self._head, "choices": [choice], "usage": None}]


def usage_chunk(head: ChatHead, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The chunk that `include_usage` adds before the end."""
    fields = head.fields("chat.completion.chunk")
    return fields | {"choices": [], "usage": usage(prompt_tokens, completion_tokens)}


def logprob(token: Token, top_tokens: Sequence[Token]) -> dict[str, Any]:
    return {
        "token": token.text,
        "logprob": token.json_logprob,
        "top_logprobs": [{"token": top.text, "logprob": top.json_logprob} for top in top_tokens],
    }
