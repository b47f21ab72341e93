"""What the answers of chats and completions have in common: their first fields and `usage`."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from router.config import TGI_VERSION
from router.events import Predicted


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The first fields of an answer, or of every chunk of a stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Self:
        """With an id of its own that begins with `prefix`, and the current time."""
        return cls(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=model,
            system_fingerprint=f"{TGI_VERSION}-native",
        )


def usage(
    prompt_tokens: int,
    completion_tokens: int,
    reasoning_tokens: int | None = None,
    *,
    cached_tokens: int | None,
    predicted: Sequence[Predicted | None] = (),
) -> dict[str, Any]:
    """`reasoning_tokens`: None where no reasoning is read. `cached_tokens`: of the prompt, from the prefix cache; None
    while that is not known. `predicted`: of each choice that ended; None where the request had no prediction."""
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
