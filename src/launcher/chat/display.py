"""Shows an answer as it comes: as Markdown at a terminal, else as text."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Protocol

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

from launcher.chat.client import Piece
from wire.text.escape import escape

_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"
_ROWS_FOR_OTHERS = 4
_REDRAWS_PER_S = 12
_PARSER = MarkdownIt("commonmark", {"html": False}).enable("strikethrough").enable("table")


class Display(Protocol):
    """Shows one answer. What a model says must not steer the terminal: every text is escaped."""

    def __enter__(self) -> Display: ...

    def show(self, piece: Piece) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class PlainDisplay:
    """The text as it is. Reasoning is shown, dimmed, to people; programs get the answer alone."""

    def __init__(self, *, shows_reasoning: bool, dims: bool) -> None:
        self._shows_reasoning = shows_reasoning
        self._marks = (_DIM, _NORMAL) if dims else ("", "")
        self.is_reasoning = False

    def __enter__(self) -> PlainDisplay:
        return self

    def show(self, piece: Piece) -> None:
        if piece.is_reasoning and not self._shows_reasoning:
            return
        if piece.is_reasoning != self.is_reasoning:
            self._turn(piece.is_reasoning)
        sys.stdout.write(escape(piece.text))
        sys.stdout.flush()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.is_reasoning:
            self._turn(False)

    def _turn(self, is_reasoning: bool) -> None:
        begin, end = self._marks
        sys.stdout.write(f"{begin}[thinking] " if is_reasoning else f"{end}\n\n")
        self.is_reasoning = is_reasoning


class MarkdownDisplay:
    """Shows complete blocks as Markdown, and the block that is coming as text."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._text = ""
        self._reasoning = PlainDisplay(shows_reasoning=True, dims=True)
        self._live = Live(
            console=console,
            transient=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._drawn_at = 0.0

    def __enter__(self) -> MarkdownDisplay:
        return self

    def show(self, piece: Piece) -> None:
        if piece.is_reasoning:
            self._stop()
            self._reasoning.show(piece)
            return
        if self._reasoning.is_reasoning:
            self._reasoning.show(Piece(""))
        self._text += escape(piece.text)
        self._flush(is_end=False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reasoning.__exit__(kind, error, trace)
        self._flush(is_end=True)
        self._stop()

    def _flush(self, *, is_end: bool) -> None:
        done, rest = (self._text, "") if is_end else complete_blocks(self._text)
        if done:
            self._stop()
            self._console.print(_markdown(done))
        self._text = rest
        now = self._console.get_time()
        if rest and now - self._drawn_at > 1 / _REDRAWS_PER_S:
            self._drawn_at = now
            if not self._live.is_started:
                self._live.start()
            self._live.update(self._last_rows(rest), refresh=True)

    def _last_rows(self, text: str) -> Text:
        """Keep as many of the last rows as fit the terminal: rows above it cannot be taken back."""
        rows = Text(text).wrap(self._console, self._console.width)
        return Text("\n").join(rows[-max(1, self._console.height - _ROWS_FOR_OTHERS) :])

    def _stop(self) -> None:
        if self._live.is_started:
            self._live.update(Text(""))
            self._live.stop()


def _markdown(text: str) -> Markdown:
    """Markdown of which nothing is lost: rich's own parser leaves out what looks like HTML."""
    shown = Markdown("", hyperlinks=False)
    shown.markup, shown.parsed = text, _PARSER.parse(text)
    return shown


def complete_blocks(text: str) -> tuple[str, str]:
    """Split Markdown before its last block, which may still grow."""
    starts = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map and token.nesting >= 0]
    if len(starts) < 2:
        return "", text
    lines = text.splitlines(keepends=True)
    return "".join(lines[: starts[-1]]), "".join(lines[starts[-1] :])
