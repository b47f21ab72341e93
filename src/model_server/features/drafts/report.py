"""What steps report of drafts."""

from __future__ import annotations

from dataclasses import dataclass, field

from wire.step_phases import DraftKind


@dataclass(frozen=True, slots=True)
class Drafted:
    """What a step drafted for this rank's requests."""

    # The longest draft.
    longest: int
    # Drafted, and (`right`) accepted, by `DraftKind`.
    tokens: tuple[int, ...]
    right: tuple[int, ...]
    # By request id, accepted and rejected tokens of its prediction.
    predicted: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def num_right(self) -> int:
        return sum(self.right)


NOTHING_DRAFTED = Drafted(0, (0,) * len(DraftKind), (0,) * len(DraftKind))
