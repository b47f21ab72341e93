"""Bars below a terminal's log, a line for each loading rank, drawn from records.

`extra={"progress": "done/total"}` moves a rank's bar; the last one is written. Elsewhere all are plain records. `bar`
is a download's text. Frequent writers ask `are_drawn`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
import threading
from collections.abc import Iterable, Mapping
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

from wire.text.escape import one_line

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress, TaskID

FIELD = "progress"
TEXT = "bar"
WANTED = "TERCET_BARS"
"""Set to 1 by a parent that draws bars from the records of this process."""
WIDTH = 30
_VALUE = re.compile(r"(\d{1,9})/(\d{1,9})")


class Stream(Protocol):
    """Any text stream for lines."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> object: ...
    def isatty(self) -> bool: ...


def are_drawn(environ: Mapping[str, str]) -> bool:
    """Whether records with progress become bars, here or at the parent."""
    streams = [getattr(handler, "stream", None) for handler in logging.getLogger().handlers]
    return environ.get(WANTED) == "1" or any(isinstance(stream, StatusLines) for stream in streams)


class StatusLines:
    """A terminal whose last lines can be replaced. Whole log lines are written above them. Safe for threads."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._progress = _progress(stream)
        self._tasks: dict[object, TaskID] = {}
        self._lock = threading.Lock()

    def write(self, text: str, /) -> object:
        """Text of whole lines goes above the status lines."""
        from rich.segment import Segment, Segments

        with self._lock:
            if self._tasks:
                # As it is: its colours are its own, and a line that is too long is the terminal's to wrap.
                self._progress.console.print(Segments([Segment(text)]), end="", soft_wrap=True)
            else:
                self._stream.write(text)
        return len(text)

    def flush(self) -> object:
        return self._stream.flush()

    def isatty(self) -> bool:
        return True

    def show(self, key: object, text: str, *, done: int = 0, total: int | None = None, after: str = "") -> None:
        """Set the line of `key`: a text, and with a `total` a bar and what comes after it."""
        with (
            self._lock,
            contextlib.suppress(OSError, ValueError),
        ):  # a stream that breaks loses lines, as it loses records
            if key not in self._tasks:
                self._tasks[key] = self._progress.add_task("", total=None, after="", key=str(key))
            self._progress.update(
                self._tasks[key], description=one_line(text), completed=done, total=total, after=one_line(after)
            )
            self._progress.start()
            self._progress.refresh()

    def remove(self, key: object) -> None:
        with self._lock, contextlib.suppress(OSError, ValueError):
            if (task := self._tasks.pop(key, None)) is not None:
                self._progress.remove_task(task)
                self._progress.refresh()
                if not self._tasks:
                    self._progress.stop()

    def clear(self) -> None:
        for key in list(self._tasks):
            self.remove(key)


def _progress(stream: Stream) -> Progress:
    """The lines of rich, drawn when they are asked for and taken away in the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskProgressColumn, TextColumn
    from rich.text import Text

    class Terminal(Console):
        def show_cursor(self, show: bool = True) -> bool:
            """Leaves it alone: a process that is killed could not bring it back."""
            return False

    class OfBars(ProgressColumn):
        """A column that lines without a bar do not have."""

        def __init__(self, column: ProgressColumn) -> None:
            super().__init__()
            self._column = column

        def render(self, task: Task) -> RenderableType:
            return Text() if task.total is None else self._column.render(task)

    class InOrder(Progress):
        def get_renderables(self) -> Iterable[RenderableType]:
            yield self.make_tasks_table(sorted(self.tasks, key=lambda task: str(task.fields["key"])))

    return InOrder(
        TextColumn("{task.description}", markup=False),
        OfBars(BarColumn(WIDTH)),
        OfBars(TaskProgressColumn()),
        TextColumn("{task.fields[after]}", markup=False),
        console=Terminal(file=cast("IO[str]", stream), force_terminal=True, legacy_windows=False),
        auto_refresh=False,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


class ProgressFilter(logging.Filter):
    """Draws bars in a process' one handler."""

    def __init__(self, lines: StatusLines | None, rank: int | None = None, *, downloads_only: bool = False) -> None:
        super().__init__()
        self._lines, self._rank, self._downloads_only = lines, rank, downloads_only

    def filter(self, record: logging.LogRecord) -> bool:
        fields = self._taken(record)
        found = _VALUE.fullmatch(str(fields.get(FIELD)))
        if found is None or int(found[2]) == 0 or self._lines is None:
            # An error ends the load of any process: nothing should be left below it.
            if self._lines is not None and record.levelno >= logging.ERROR:
                self._lines.clear()
            return True
        if self._downloads_only and not isinstance(fields.get(TEXT), str):
            return True
        self._draw(fields, self._lines, done=int(found[1]), total=int(found[2]))
        return int(found[1]) >= int(found[2])

    def _draw(self, fields: Mapping[str, Any], lines: StatusLines, *, done: int, total: int) -> None:
        rank, text = fields["rank"], fields.get(TEXT)
        if done >= total:
            lines.remove(rank)
        elif isinstance(text, str):
            lines.show(rank, "Downloading", done=done, total=total, after=text[:100])
        else:
            name = "Loading weights" if rank is None else f"Loading weights, rank {rank}"
            lines.show(rank, name, done=done, total=total)

    def _taken(self, record: logging.LogRecord) -> dict[str, Any]:
        """The fields above of a record, which loses them, and its rank."""
        line = getattr(record, "log_line", None)
        if line is None:
            taken = {name: record.__dict__.pop(name, None) for name in (FIELD, TEXT)}
            return taken | {"rank": self._rank}
        taken = {name: line.fields.get(name) for name in (FIELD, TEXT)}
        if taken[FIELD] is not None:
            rest = {key: field for key, field in line.fields.items() if key not in taken}
            record.log_line = dataclasses.replace(line, fields=rest)
        return taken | {"rank": line.rank}
