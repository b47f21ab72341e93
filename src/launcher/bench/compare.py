"""Two runs side by side: figures, ratios, and what was not the same in them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from launcher.bench.report import chart, milliseconds, pipe_table, short
from launcher.bench.results import Cell
from launcher.bench.run import Run

# Column -> its shorter name on a terminal of 80 columns, None where there is no place for it.
COLUMNS = {
    "load": "load", "output tok/s": "tok/s", "TTFT p50 ms": "TTFT p50 ms", "TTFT p99 ms": None,
    "TPOT p50 ms": "TPOT p50 ms", "TPOT p99 ms": None,
}  # fmt: skip
LEGEND = "A → B (B / A): more than 1.00 is better for tokens/s, less than 1.00 for times."
_SPREAD = "≈: the repeats of A and of B overlap."
_ONE_REPEAT = "Measured once: a few percent may be chance; --repeats 3 shows how much figures vary."

# Options that must be the same for figures to be comparable.
_CONDITIONS = ("prompt", "output", "api", "temperature", "ignore_eos", "num_requests", "warmup")
# Servers with other tokenizers count other numbers of tokens in prompts of the same length.
_LENGTH_TOLERANCE = 1.05


@dataclass(frozen=True)
class Comparison:
    """Run B, usually the later one, compared with run A."""

    a: Run
    b: Run

    @property
    def heading(self) -> str:
        if self.a.heading == self.b.heading:
            return f"{self.a.heading}: two runs, A and B"
        return f"A: {self.a.heading}. B: {self.b.heading}"

    def rows(self) -> list[tuple[str, ...]]:
        """Lines of the table, under COLUMNS: the loads that both runs have."""
        return [_row(a, b) for a, b in self._pairs()]

    def notes(self) -> list[str]:
        """Below the table: how to read it, and what differs beyond what was to be compared."""
        spread = [_SPREAD] if any("≈" in row[1] for row in self.rows()) else []
        once = [_ONE_REPEAT] if any(len(cell.repeats) < 2 for pair in self._pairs() for cell in pair) else []
        return [" ".join([LEGEND, *spread]), *once, *self.differences()]

    def differences(self) -> list[str]:
        facts = [("machine", self.a.machine, self.b.machine), ("model", self.a.model, self.b.model)]
        facts += [(f"--{name.replace('_', '-')}", *self._values(name)) for name in _CONDITIONS]
        lines = [f"Not the same {what}: {a or 'unknown'} (A), {b or 'unknown'} (B)." for what, a, b in facts if a != b]
        return [*lines, *self._different_prompts(), *self._unpaired()]

    def markdown(self) -> str:
        lines = [f"**{self.heading}**", "", *pipe_table(list(COLUMNS), self.rows()), ""]
        return "\n".join([*lines, *(f"{note}  " for note in (*self.notes(), *self._runs("`"))), ""])

    def chart(self) -> str:
        """Both runs as SVG."""
        return chart(self.heading, {"A": self.a, "B": self.b}, [*self.differences(), *self._runs("")])

    def _runs(self, quote: str) -> list[str]:
        """What is known of each run."""
        return [
            f"{letter}: {quote}{note}{quote}" if note == run.command else f"{letter}: {note}"
            for letter, run in (("A", self.a), ("B", self.b))
            for note in run.notes
        ]

    def _pairs(self) -> list[tuple[Cell, Cell]]:
        of_b = {cell.load: cell for cell in self.b.cells}
        return [(cell, of_b[cell.load]) for cell in self.a.cells if cell.load in of_b]

    def _values(self, option: str) -> tuple[str, str]:
        a, b = (run.options.get(option) for run in (self.a, self.b))
        return "unset" if a is None else str(a), "unset" if b is None else str(b)

    def _different_prompts(self) -> Iterator[str]:
        """Name the loads whose prompts differ although both runs asked for the same length."""
        if self.a.options["prompt"] != self.b.options["prompt"]:
            return
        counts = [[n for cell in cells if (n := cell.prompt_tokens)] for cells in zip(*self._pairs(), strict=True)]
        if len(counts) == 2 and all(counts):
            a, b = (statistics.fmean(each) for each in counts)
            if max(a, b) > _LENGTH_TOLERANCE * min(a, b):
                yield f"Not the same prompts, in tokens as the servers count them: {a:.0f} (A), {b:.0f} (B)."

    def _unpaired(self) -> Iterator[str]:
        common = {a.load for a, _ in self._pairs()}
        for letter, run in (("A", self.a), ("B", self.b)):
            alone = [cell.load for cell in run.cells if cell.load not in common]
            if alone:
                yield f"Only in {letter}: {', '.join(alone)}."


def _row(a: Cell, b: Cell) -> tuple[str, ...]:
    times = [(getattr(a, name), getattr(b, name)) for name in ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")]
    return (
        a.load,
        _change(
            short(a.output_tokens_per_s), short(b.output_tokens_per_s),
            _ratio(a.output_tokens_per_s, b.output_tokens_per_s, "≈" if _overlap(a.repeats, b.repeats) else ""),
        ),
        *(_change(milliseconds(one), milliseconds(other), _ratio(one, other)) for one, other in times),
    )  # fmt: skip


def _change(a: str, b: str, ratio: str) -> str:
    return f"{a} → {b} ({ratio})"


def _ratio(a: float, b: float, mark: str = "") -> str:
    """b / a; a dash where one of them was not measured."""
    return f"{mark}{b / a:.2f}" if a > 0 and b >= 0 else "–"


def _overlap(a: list[float], b: list[float]) -> bool:
    """Whether the repeats of two cells say that their difference may be chance."""
    return len(a) > 1 and len(b) > 1 and max(min(a), min(b)) <= min(max(a), max(b))
