"""How long the parts of a generation took."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Timings:
    """A finished request's parts, in seconds."""

    total: float
    validation: float
    queue: float
    inference: float
    num_tokens: int

    @property
    def per_token(self) -> float:
        return self.inference / max(self.num_tokens, 1)

    def after(self, before: Timings | None) -> Timings:
        """Add what had to end before this could begin; `validation` is from the arrival on."""
        if before is None:
            return self
        return replace(
            self,
            validation=self.validation - before.queue - before.inference,
            queue=self.queue + before.queue,
            inference=self.inference + before.inference,
        )
