"""A prompt typed at the terminal, and what Ctrl-C and Ctrl-D do to it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from launcher.chat import prompt
from launcher.chat.conversation import ChatEndedError

Type = Callable[..., list[str]]


class CtrlC:
    def __init__(self, typed: str) -> None:
        self.typed = typed


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Type:
    """Sets what `input` returns, one after the other, or raises; the result is the prompts that were shown."""

    def set_typed(*lines: str | CtrlC | type[EOFError]) -> list[str]:
        shown: list[str] = []
        left = list(lines)

        def fake_input(text: str) -> str:
            shown.append(text)
            line = left.pop(0)
            if isinstance(line, CtrlC):
                typed = line.typed
                monkeypatch.setattr(prompt.readline, "get_line_buffer", lambda: typed)
                signal.raise_signal(signal.SIGINT)
                raise AssertionError("the handler has not raised")
            if not isinstance(line, str):
                raise line
            return line

        monkeypatch.setattr("builtins.input", fake_input)
        return shown

    return set_typed


def test_a_line(typed: Type) -> None:
    shown = typed(" What is Tercet? ")
    assert prompt.ask() == "What is Tercet?"
    assert shown == ["> "]


def test_several_lines(typed: Type) -> None:
    shown = typed("one\\", "\\", "three")
    assert prompt.ask() == "one\n\nthree"
    assert shown == ["> ", "  ", "  "]


@pytest.mark.parametrize("lines", [[EOFError], ["begun\\", EOFError], [CtrlC("")]])
def test_the_end(typed: Type, lines: list[str | CtrlC | type[EOFError]]) -> None:
    typed(*lines)
    with pytest.raises(ChatEndedError):
        prompt.ask()


@pytest.mark.parametrize("lines", [[CtrlC("half a question")], ["one\\", CtrlC("")]])
def test_ctrl_c_throws_away_what_was_typed(typed: Type, lines: list[str | CtrlC]) -> None:
    typed(*lines)
    assert prompt.ask() == ""


def test_ctrl_c_means_the_usual_again_afterwards(typed: Type) -> None:
    before = signal.getsignal(signal.SIGINT)
    for line in ("text", CtrlC("text")):
        typed(line)
        prompt.ask()
        assert signal.getsignal(signal.SIGINT) is before
