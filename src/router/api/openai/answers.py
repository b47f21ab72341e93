"""First fields and `usage` of chats and completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from router.config import TGI_VERSION
from router.events import Predicted
from router.request import ValidRequest


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The first fields of an answer or chunk."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    # What the request has got, where its client asked for one.
    service_tier: str | None = None

    @classmethod
    def new(cls, prefix: str, model: str) -> Self:
        """Make an id with `prefix`, and the time."""
        return cls(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            system_fingerprint=f"{TGI_VERSION}-native",
        )

    def served(self, request: ValidRequest, asked: str | None) -> Self:
        """Add the tier of a request, if one was asked for."""
        return self if asked is None else replace(self, service_tier=tier_of(request))

    def _tier(self) -> dict[str, str]:
        return {} if self.service_tier is None else {"service_tier": self.service_tier}


def tier_of(request: ValidRequest) -> str:
    """Return OpenAI's name of a request's priority."""
    return "default" if not request.priority else "priority" if request.priority < 0 else "flex"


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    reasoning_tokens: int | None = None,
    *,
    cached_tokens: int | None,
    predicted: Sequence[Predicted | None] = (),
) -> dict[str, Any]:
    """Return the usage.

    Args:
        reasoning_tokens: None: not read.
        cached_tokens: Of the prompt; None: unknown yet.
        predicted: Of ended choices; None: no prediction.
    """
    used: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }
    if cached_tokens is not None:
        used["prompt_tokens_details"] = {"cached_tokens": cached_tokens}
    details: dict[str, int] = {}
    if reasoning_tokens is not None:
        details["reasoning_tokens"] = reasoning_tokens
    if known := [one for one in predicted if one is not None]:
        found = sum(known, Predicted())
        details["accepted_prediction_tokens"] = found.accepted
        details["rejected_prediction_tokens"] = found.rejected
    if details:
        used["completion_tokens_details"] = details
    return used
