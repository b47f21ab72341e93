"""What a stage says: figures with what they are a share of, checks that passed or failed, and what was left out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Target:
    """A bar: what must be reached and what is aimed at. `on`: the share of the roofline, or the figure itself in its
    own unit, or the ratio to the peer. `at_least` False: smaller is better."""

    must: float
    aim: float
    on: Literal["ratio", "value", "peer"] = "ratio"
    at_least: bool = True

    def judge(self, line: Line) -> str:
        """`aim met`, `must met` or `not met`; empty if the line has no such number."""
        judged = {"ratio": line.ratio, "value": line.value, "peer": line.peer}[self.on]
        if judged is None:
            return ""
        reached = (lambda bar: judged >= bar) if self.at_least else (lambda bar: judged <= bar)
        return "aim met" if reached(self.aim) else "must met" if reached(self.must) else "not met"


@dataclass(slots=True)
class Line:
    """One row of the report.

    kind: `figure` has a value; `check` has `passed`; `note` and `skipped` have text alone. ratio: share of the
    roofline, 1 is the limit. spread: the relative difference of the medians of two runs. predicted: in the figure's
    unit. peer: how many times the peer's figure ours is.
    """

    kind: Literal["figure", "check", "note", "skipped"]
    name: str
    value: float | None = None
    unit: str = ""
    ratio: float | None = None
    spread: float | None = None
    predicted: float | None = None
    peer: float | None = None
    target: Target | None = None
    passed: bool | None = None
    detail: str = ""

    @property
    def verdict(self) -> str:
        if self.kind == "check":
            return "passed" if self.passed else "FAILED"
        return self.target.judge(self) if self.target is not None else ""

    def to_json(self) -> dict[str, Any]:
        """Without what is not set."""
        found = {k: v for k, v in asdict(self).items() if v not in (None, "")}
        return found | ({"verdict": self.verdict} if self.verdict else {})

    def to_text(self) -> str:
        """The same as one line of a file."""
        return json.dumps(self.to_json())


def from_json(fields: dict[str, Any]) -> Line:
    """What `to_json` gave."""
    fields = {k: v for k, v in fields.items() if k != "verdict"}
    target = fields.pop("target", None)
    return Line(**fields, target=None if target is None else Target(**target))
