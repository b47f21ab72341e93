"""What a soak has seen, as Markdown."""

from __future__ import annotations

import platform
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path

from hostile.loop_watch import Hold
from hostile.rounds import Outcome

SETTLED_S = 600.0
"""Allocators need a while: growth counts from the first look after that."""
MAX_GROWTH = 0.05


class Report:
    """Sums over all rounds, and the memory of each process over time."""

    def __init__(self, *, commit: str, seed: int) -> None:
        self.num_rounds = 0
        self.fault: str | None = None
        self._title = f"commit {commit}, seed {seed}, {_processor()}"
        self._started = time.monotonic()
        self._sums: dict[str, Counter[str]] = {}
        self._seconds: Counter[str] = Counter()
        self._memory: list[tuple[float, str, dict[str, int]]] = []
        self._slowest: dict[str, Hold] = {}

    def add(self, outcome: Outcome) -> None:
        sums = self._sums.setdefault(outcome.name, Counter())
        for what, number in outcome.seen.items():
            sums[what] = max(sums[what], number) if what.startswith("longest ") else sums[what] + number
        held, before = outcome.slowest, self._slowest.get(outcome.name)
        if held is not None and (before is None or held.used_s > before.used_s):
            self._slowest[outcome.name] = held
        self._seconds[outcome.name] += round(outcome.seconds)
        self._memory.append((time.monotonic() - self._started, outcome.name, outcome.memory))

    def end_round(self) -> None:
        self.num_rounds += 1

    def line(self, outcome: Outcome) -> str:
        sizes = ", ".join(f"{name} {size >> 20} MiB" for name, size in outcome.memory.items())
        elapsed = self._memory[-1][0]
        told = f"{elapsed:6.0f} s  {outcome.name}: {dict(outcome.seen)}, {outcome.seconds:.0f} s; {sizes}"
        return told if outcome.slowest is None else f"{told}; loop held {_milliseconds(outcome.slowest)}"

    @property
    def growth(self) -> dict[str, float]:
        """Of each process since it had settled, the median over attacks; nothing if that was not long enough ago.

        Looks behind the same attack are compared: each leaves another amount that the next ones give back.
        """
        seen: dict[str, dict[str, list[int]]] = {}
        for elapsed, attack, sizes in self._memory:
            if elapsed >= SETTLED_S:
                for name, size in sizes.items():
                    seen.setdefault(name, {}).setdefault(attack, []).append(size)
        grown = {
            name: [sizes[-1] / sizes[0] - 1 for sizes in of_attacks.values() if len(sizes) > 1]
            for name, of_attacks in seen.items()
        }
        return {name: statistics.median(found) for name, found in grown.items() if found}

    @property
    def is_good(self) -> bool:
        return self.fault is None and all(growth < MAX_GROWTH for growth in self.growth.values())

    def text(self) -> str:
        elapsed = time.monotonic() - self._started
        lines = [
            "# Soak",
            "",
            f"{self._title}; {self.num_rounds} whole rounds in {elapsed / 60:.0f} minutes",
            "",
            "| Attack | Seconds | Seen | Slowest hold of the event loop |",
            "|---|---|---|---|",
        ]
        for name, seen in self._sums.items():
            told = ", ".join(f"{what} {number}" for what, number in sorted(seen.items()))
            held = _milliseconds(self._slowest[name]) if name in self._slowest else ""
            lines.append(f"| {name} | {self._seconds[name]} | {told} | {held} |")
        lines += ["", "| Minute | " + " | ".join(f"{name}, MiB" for name in self._names()) + " |"]
        lines.append("|---|" + "---|" * len(self._names()))
        lines += [
            f"| {elapsed / 60:.0f} | "
            + " | ".join(str(sizes[name] >> 20) if name in sizes else "" for name in self._names())
            + " |"
            for elapsed, sizes in self._every_ten_minutes()
        ]
        if self._slowest:
            name, hold = max(self._slowest.items(), key=lambda held: held[1].used_s)
            lines += [
                "",
                f"Slowest hold of the event loop: {_milliseconds(hold)} in {name}: {hold.stack or 'not seen'}.",
            ]
        growth = ", ".join(f"{name} {value:+.1%}" for name, value in self.growth.items())
        lines += ["", f"Growth since minute {SETTLED_S / 60:.0f}: {growth or 'the soak was too short'}.", ""]
        lines.append(f"**Fault**: {self.fault}" if self.fault else "Nothing was held, lost or answered twice.")
        return "\n".join(lines) + "\n"

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for _, _, sizes in self._memory for name in sizes))

    def _every_ten_minutes(self) -> list[tuple[float, dict[str, int]]]:
        chosen: list[tuple[float, dict[str, int]]] = []
        for number, (elapsed, _, sizes) in enumerate(self._memory):
            if not chosen or elapsed - chosen[-1][0] >= 600 or number == len(self._memory) - 1:
                chosen.append((elapsed, sizes))
        return chosen


def _milliseconds(hold: Hold) -> str:
    """Of the thread's own time, and by the clock, in which others may have had the processor."""
    return f"{1000 * hold.used_s:.0f} ms ({1000 * hold.wall_s:.0f} by the clock)"


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


def commit() -> str:
    """Name what is checked out."""
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
