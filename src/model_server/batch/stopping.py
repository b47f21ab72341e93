"""When a request ends and its text is cut, as TGI's `StoppingCriteria`: LENGTH, EOS_TOKEN, STOP_SEQUENCE, in this
order.
"""

from __future__ import annotations

from model_server.batch.results import FinishReason
from model_server.sampling.parameters import StoppingParameters

# TGI keeps a window of the streamed text: above 300 characters only the last 200 stay.
_WINDOW_LIMIT = 300
_WINDOW_KEPT = 200


class StoppingState:
    """Counts a request's tokens and watches its text.

    Stop text, which may end within a token, stays; `cut` removes what follows. The window grows with the longest stop
    string.
    """

    def __init__(self, parameters: StoppingParameters, eos_token_ids: frozenset[int], min_tokens: int = 0) -> None:
        self.num_tokens = 0
        self._min_tokens = min_tokens
        self._max_new_tokens = parameters.max_new_tokens
        self._end_ids = parameters.stop_token_ids | (frozenset() if parameters.ignore_eos_token else eos_token_ids)
        self._stops = tuple(stop for stop in dict.fromkeys(parameters.stop_sequences) if stop)
        longest = max(map(len, self._stops), default=0)
        self._kept = max(_WINDOW_KEPT, longest)
        self._limit = max(_WINDOW_LIMIT, longest)
        self._window = ""
        self._rest = ""  # what the last token brought after the first match

    def check(self, token_id: int, text: str) -> FinishReason | None:
        """Return why the request ends with this token, if it does; not called again then.

        Args:
            text: Streamed, with special tokens as text.
        """
        self.num_tokens += 1
        stopped = bool(self._stops) and self._matches(text)
        if self.num_tokens >= self._max_new_tokens:
            return FinishReason.LENGTH
        if token_id in self._end_ids:
            return FinishReason.EOS_TOKEN
        return FinishReason.STOP_SEQUENCE if stopped else None

    def cut(self, text: str) -> str:
        """Cut the final text after the first match; a dropped special token leaves nothing to cut."""
        if self._rest and text.endswith(self._rest):
            return text[: -len(self._rest)]
        return text

    def _matches(self, text: str) -> bool:
        num_seen = len(self._window)
        self._window += text
        found = self._find(num_seen)
        if len(self._window) > self._limit:
            self._window = self._window[-self._kept :]
        if self.num_tokens > self._min_tokens:
            return found
        self._rest = ""
        return False

    def _find(self, num_seen: int) -> bool:
        """Find the match that ends first, in the new text."""
        ends = []
        for stop in self._stops:
            at = self._window.find(stop, max(0, num_seen - len(stop) + 1))
            if at >= 0:
                ends.append(at + len(stop))
        if not ends:
            return False
        self._rest = self._window[min(ends) :]
        return True
