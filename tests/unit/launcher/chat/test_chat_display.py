"""Answers on a terminal: blocks of Markdown that stay, reasoning dimmed, nothing lost and nothing that steers it."""

from __future__ import annotations

import io
import random
from collections.abc import Callable

import pytest
from rich.console import Console

from launcher.chat.client import Piece
from launcher.chat.display import MarkdownDisplay, PlainDisplay, complete_blocks

TEXT = """\
# Title

Some *text* with <b>tags</b>, <br> and a [link](https://example.org/x).

<div>
a block of HTML
</div>

1. one
2. two

| a | b |
|---|---|
| 1 | 2 |

```python
x = "<i>"

y = 2
```

end
"""

Shown = Callable[..., str]


@pytest.fixture
def shown() -> Shown:
    """What a terminal shows of pieces of an answer, at last, without colours."""

    def show(*pieces: Piece, width: int = 60) -> str:
        file = io.StringIO()
        console = Console(file=file, force_terminal=True, width=width, height=20, color_system=None)
        with MarkdownDisplay(console) as display:
            for piece in pieces:
                display.show(piece)
        return file.getvalue()

    return show


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_nothing_is_lost(shown: Shown, size: int) -> None:
    text = shown(*(Piece(TEXT[at : at + size]) for at in range(0, len(TEXT), size)))
    for words in ("Title", "<b>tags</b>", "<br>", "a block of HTML", "<div>", "1 one", "2 two", 'x = "<i>"', "y = 2",
                  "end", "https://example.org/x"):  # fmt: skip
        assert words in text
    assert "\x1b]8" not in text, "no link whose address is not shown"


def test_blocks_are_split_where_they_end() -> None:
    done = rest = ""
    for letter in TEXT:
        more, rest = complete_blocks(rest + letter)
        done += more
    assert done + rest == TEXT
    assert rest == "end\n"
    assert "```python" in done and complete_blocks("```python\nx = 1\n\ny") == ("", "```python\nx = 1\n\ny")


@pytest.mark.parametrize("seed", range(20))
def test_any_text_is_kept_whole(seed: int) -> None:
    letters = random.Random(seed)
    text = "".join(letters.choice("a \n#-*`|>1.[]()<") for _ in range(300))
    done, rest = complete_blocks(text)
    assert done + rest == text


def test_reasoning_is_apart_from_the_answer(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    assert "Yes" in shown(Piece("Hm", is_reasoning=True), Piece(" so", is_reasoning=True), Piece("Yes"))
    assert capsys.readouterr().out == "\x1b[2m[thinking] Hm so\x1b[0m\n\n"


def test_programs_get_the_answer_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with PlainDisplay(shows_reasoning=False, dims=False) as display:
        for piece in (Piece("Hm", is_reasoning=True), Piece("Yes")):
            display.show(piece)
    assert capsys.readouterr().out == "Yes"


def test_no_text_steers_the_terminal(shown: Shown, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(Piece("a\x1b[31mb\n\n[c](https://x.example/\x1b]0;t\x07)\n\n```\n\x1b[2J\n```\n"))
    assert "\x1b[31m" not in text and "\x1b]0" not in text and "\x1b[2J" not in text and "\\x1b[31mb" in text
    shown(Piece("a\x1b[31mb", is_reasoning=True))
    assert "\\x1b[31mb" in capsys.readouterr().out
