"""What the engine asks of a feature: of what some models read beside tokens. A model of text has none.

`start` and `try_out` are asked in a warm-up, `admit` for a request, `prepare` for a step with prompts, and `extend` for
each step of other rows than the last one's.
What a feature knows of a request is an `Attachment` of its sequence, and goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, field, replace
from typing import TypeVar

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
    # Return all sequences that have further steps: the same on every rank.
    running: Callable[[], Iterable[Sequence]] = tuple
    attachments: list[Attachment] = field(default_factory=list)

    def read(self, kind: type[A]) -> A | None:
        """Return what the request asks of the feature that reads this kind."""
        found = next((asked for asked in self.unserved if isinstance(asked, kind)), None)
        if found is not None:
            self.unserved.remove(found)
        return found


class ModelFeature:
    """What a model reads beside tokens, on the device thread."""

    # What it is called in a trace.
    name: str

    @property
    def remedy(self) -> str:
        """Name options that lower its memory, if any."""
        return ""

    def start(self, longest: int) -> int:
        """Begin a router's session, forgetting all; return bytes to leave beside the cache."""
        return 0

    def try_out(self, *, largest: bool) -> object:
        """Compute the most or a little of what requests will need; the caller measures memory while it holds it."""
        return None

    def admit(self, admission: Admission) -> None:
        """Read what a request asks; add an `Attachment`, if the sequence needs one.

        Raises:
            RequestError: It cannot be computed.
        """

    def prepare(self, sequences: Rows[Sequence]) -> tuple[list[Failure], object]:
        """Compute what the next forward reads; return what failed, on all ranks, and a report or None."""
        return [], None

    def extend(
        self, inputs: ModelInputs, sequences: Rows[Sequence], counts: Rows[int], staging: Staging
    ) -> ModelInputs:
        """Return the inputs of the next forward with what the feature adds.

        Args:
            counts: Tokens of each sequence.
        """
        return inputs


class Extension:
    """What features add to a batch's steps; between steps of the same rows it is kept."""

    def __init__(self, features: tuple[ModelFeature, ...]) -> None:
        self._features = features
        self._rows: Rows[Sequence] = ()
        # By the number of each row's tokens.
        self._kept: dict[int, ModelInputs] = {}

    def of(self, inputs: ModelInputs, sequences: Rows[Sequence], counts: Rows[int], staging: Staging) -> ModelInputs:
        """Return the inputs of `counts` tokens of each sequence, extended."""
        for feature in self._features:
            inputs = feature.extend(inputs, sequences, counts, staging)
        return inputs

    def of_rows(self, inputs: ModelInputs, rows: Rows[Sequence], count: int, staging: Staging) -> ModelInputs:
        """Return the inputs of `count` tokens of each row; features are asked where `rows` is another list."""
        if not self._features:
            return inputs
        if rows is not self._rows:
            self._rows, self._kept = rows, {}
        if count not in self._kept:
            self._kept[count] = self.of(inputs, rows, (count,) * len(rows), staging)
        kept, attention = self._kept[count], inputs.attention
        return replace(kept, input_ids=inputs.input_ids, positions=inputs.positions, attention=attention)

    def release(self) -> None:
        """Forget the rows."""
        self._rows, self._kept = (), {}
