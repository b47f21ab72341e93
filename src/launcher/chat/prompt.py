"""Reads a prompt at the terminal with readline; a backslash at the end of a line continues it."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from launcher.chat.conversation import ChatEndedError

try:
    import readline
except ImportError:  # a Python that was built without it
    readline = None  # type: ignore[assignment]


def ask(begun: str = "") -> str:
    """Read a prompt; empty after Ctrl-C.

    Args:
        begun: Text that can be edited, or is only shown without readline.

    Raises:
        ChatEndedError: The input ended, or Ctrl-C came before any text.
    """
    lines: list[str] = []
    with _interrupts() as interrupted_text, _begun(begun):
        try:
            while True:
                line = input("  " if lines else "> ")
                if not line.endswith("\\"):
                    break
                lines.append(line[:-1])
        except EOFError:
            sys.stdout.write("\n")
            raise ChatEndedError from None
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            if lines or any(interrupted_text):
                return ""
            raise ChatEndedError from None
    return "\n".join([*lines, line]).strip()


@contextlib.contextmanager
def _begun(text: str) -> Iterator[None]:
    if not text:
        yield
        return
    one_line = text.replace("\n", " ")
    if readline is None:
        sys.stdout.write(f"{one_line}\n")
        yield
        return
    readline.set_startup_hook(lambda: readline.insert_text(one_line))
    try:
        yield
    finally:
        readline.set_startup_hook(None)


@contextlib.contextmanager
def _interrupts() -> Iterator[list[str]]:
    """What was typed when Ctrl-C came: readline knows it in the handler, and no longer after it."""
    texts: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        texts.append(readline.get_line_buffer() if readline else "")
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield texts
    finally:
        signal.signal(signal.SIGINT, previous)
