"""One run of `launcher bench`: what was measured, and everything that a reader must know to judge it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.bench.results import Cell


@dataclass(kw_only=True)
class Run:
    """Facts are texts, empty if unknown; options: as they were given or by default, without the key."""

    model: str = ""
    server: str = ""
    machine: str = ""
    measured_at: str = ""
    tool: str = ""
    command: str = ""
    options: Mapping[str, Any]
    cells: list[Cell] = field(default_factory=list)
    # Figures of a replayed log and of its replay.
    replayed: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name what was measured."""
        server = self.options.get("label") or self.server or self.options.get("url", "")
        return f"{self.model} on {server}" if self.model else str(server)

    @property
    def heading(self) -> str:
        if log := self.options.get("replay"):
            return f"{self.name}: replay of {log}"
        return f"{self.name}: prompt {self.options['prompt']}, output {self.options['output']} tokens"

    @property
    def notes(self) -> list[str]:
        """Below a table or a chart."""
        measured = f"Measured {self.measured_at} by {self.tool}." if self.measured_at else ""
        machine = f"Machine: {self.machine}." if self.machine else ""
        return [line for line in (" ".join(filter(None, (machine, measured))), self.command) if line]

    def as_json(self) -> dict[str, Any]:
        facts = {name: getattr(self, name) for name in _FACTS}
        cells = {"cells": [cell.as_json() for cell in self.cells]}
        replayed = {"replayed": self.replayed} if self.replayed else {}
        return {**facts, "options": dict(self.options), **cells, **replayed}


_FACTS = ("model", "server", "machine", "measured_at", "tool", "command")


def read_run(path: Path) -> Run:
    """The run in a bench.json. Raises ValueError with a sentence."""
    try:
        report = json.loads(path.read_bytes())
        options = report["options"]
        cells = [Cell.from_json(cell) for cell in report["cells"]]
        facts = {name: str(report.get(name, "")) for name in _FACTS}
        options["prompt"], options["output"], options["url"]
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"{path} is not a bench.json of launcher bench") from None
    return Run(**facts, options=options, cells=cells, replayed=[tuple(row) for row in report.get("replayed", [])])
