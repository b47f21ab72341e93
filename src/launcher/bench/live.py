"""What the terminal shows while cells run: the finished cells, and the progress of the running one."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from launcher.bench.load import Progress
from launcher.bench.report import COLUMNS, REPLAY_COLUMNS, row
from launcher.bench.run import Run


def table(heading: str, columns: Mapping[str, str | None], rows: Iterable[Sequence[str]]) -> RenderableType:
    """columns: full name -> name on a terminal, None for a column that it has no place for."""
    drawn = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for number, name in enumerate(filter(None, columns.values())):
        drawn.add_column(name, justify="right" if number else "left", no_wrap=True)
    for cells in rows:
        drawn.add_row(*itertools.compress(cells, columns.values()))
    return Group(Text(heading, style="bold"), drawn)


def table_of(run: Run) -> RenderableType:
    cells = table(run.heading, COLUMNS, map(row, run.cells))
    if not run.replayed:
        return cells
    return Group(
        cells, table("", dict(zip(("figure", *REPLAY_COLUMNS[1:]), REPLAY_COLUMNS, strict=True)), run.replayed)
    )


class LiveView:
    """Redraws itself four times a second on a terminal; elsewhere only the final table is written."""

    def __init__(self, run: Run, progress: Progress, console: Console) -> None:
        self._run = run
        self._progress = progress
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
        return Group(table_of(self._run), Text(line))
