"""What the engine asks of a feature: of what some models read beside tokens. A model of text has none.

`start` and `try_out` are asked in a warm-up, `admit` for a request, `prepare` and `extend` for a step with prompts.
What a feature knows of a request is an `Attachment` of its sequence, and goes with it.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from model_server.batch.growth import Failure
from model_server.batch.sequence import Asked, Attachment, NewRequest, Sequence
from model_server.memory.transfer import Staging
from model_server.runner.runner import ModelInputs

A = TypeVar("A", bound=Asked)


@dataclass(slots=True)
class Admission:
    """A request that becomes a sequence; features add to it."""

    request: NewRequest
    # As the model reads it.
    prompt: list[int]
    # Its tokens that have logits.
    known: list[int]
    # What no feature has read.
    unserved: list[Asked]
    attachments: list[Attachment] = field(default_factory=list)

    def read(self, kind: type[A]) -> A | None:
        """Return what the request asks of the feature that reads this kind."""
        found = next((asked for asked in self.unserved if isinstance(asked, kind)), None)
        if found is not None:
            self.unserved.remove(found)
        return found


class ModelFeature(Protocol):
    """What a model reads beside tokens, on the device thread."""

    @property
    def name(self) -> str:
        """Return what it is called in a trace."""

    def start(self, longest: int) -> int:
        """Begin a router's session, forgetting all; return bytes to leave beside the cache."""

    def try_out(self, *, largest: bool) -> object:
        """Compute the most or a little of what requests will need; the caller measures memory while it holds it."""

    def admit(self, admission: Admission) -> None:
        """Read what a request asks; add an `Attachment`, if the sequence needs one.

        Raises:
            RequestError: It cannot be computed.
        """

    def prepare(self, sequences: Rows[Sequence]) -> tuple[list[Failure], object]:
        """Compute what the next forward reads; return what failed, on all ranks, and a report or None."""

    def extend(self, inputs: ModelInputs, sequences: Rows[Sequence], staging: Staging) -> ModelInputs:
        """Return the inputs of the next forward with what the feature adds."""
