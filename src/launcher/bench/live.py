"""What is seen in the terminal while cells run: the cells so far, and how the one in progress does."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.bench.load import Progress
from launcher.bench.report import COLUMNS, row
from launcher.bench.results import Cell


def table(title: str, cells: Sequence[Cell]) -> Table:
    drawn = Table(title=title)
    for number, column in enumerate(COLUMNS):
        drawn.add_column(column, justify="right" if number else "left")
    for cell in cells:
        drawn.add_row(*row(cell))
    return drawn


class LiveView:
    """Redraws itself four times a second on a terminal; elsewhere only the final table is written."""

    def __init__(self, title: str, progress: Progress, cells: Sequence[Cell], console: Console) -> None:
        self._title = title
        self._progress = progress
        self._cells = cells
        self._live = Live(get_renderable=self._draw, refresh_per_second=4, console=console, transient=True)
        self._on_terminal = console.is_terminal

    def __enter__(self) -> LiveView:
        if self._on_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._on_terminal:
            self._live.stop()

    def _draw(self) -> RenderableType:
        progress = self._progress
        elapsed = max(time.perf_counter() - progress.started, 1e-9)
        line = (
            f"{progress.load}: {progress.answered} of {progress.total} answered, {progress.running} running, "
            f"{progress.tokens / elapsed:,.0f} events/s, {progress.errors} errors, {elapsed:.0f} s"
        )
        return Group(table(self._title, self._cells), Text(line))
