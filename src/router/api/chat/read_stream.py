"""A choice's stream with reasoning and calls."""

from __future__ import annotations

from typing import Any

from router.answers.reading import CallIds, ChoiceReader, Deltas
from router.api.chat.chunks import ChatHead
from router.api.openai.logprobs import TokenNames, chat_logprob
from router.events import Finished, TokenGenerated


class ReadStream:
    """Makes deltas; logprobs of tokens without one go with the next."""

    def __init__(
        self,
        head: ChatHead,
        index: int,
        reader: ChoiceReader,
        ids: CallIds,
        *,
        logprobs: TokenNames | None,
        are_joined: bool = True,
    ) -> None:
        """`are_joined`: as in `Deltas`."""
        self.reader = reader
        self._head = head.fields("chat.completion.chunk")
        self._index = index
        self._deltas = Deltas(ids, are_joined=are_joined)
        self._names = logprobs
        self._logprobs: list[dict[str, Any]] = []
        self._is_first = True

    def chunks(self, event: TokenGenerated | Finished) -> list[dict[str, Any]]:
        """Return a token's chunks."""
        if self._names is not None:
            self._logprobs.append(chat_logprob(self._names, event.token, event.top_tokens))
        if not isinstance(event, Finished):
            return [self._chunk(delta) for delta in self._deltas.of(self.reader.push(event.token))]
        deltas = self._deltas.of(self.reader.finish(event.token))
        if not deltas and self._is_first:
            deltas = [{"content": ""}]
        reason = self.reader.finish_reason(event.finish_reason)
        return [*(self._chunk(delta) for delta in deltas), self._chunk({}, reason)]

    def _chunk(self, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        if self._is_first:
            # Calls and reasoning come with content null, as in a whole answer.
            self._is_first, delta = False, {"role": "assistant", "content": None} | delta
        logprobs = None
        if self._names is not None:
            logprobs, self._logprobs = {"content": self._logprobs, "refusal": None}, []
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], "usage": None}
