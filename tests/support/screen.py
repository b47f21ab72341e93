"""What a terminal shows of what was written to it, with all that has scrolled away."""

from __future__ import annotations

import re

_CONTROL = re.compile(r"\x1b\[\??(\d*)([A-Za-z])")


def screen(text: str) -> list[str]:
    """The lines. Understands newline, return, `up`, `erase the line` and colours, and nothing else."""
    lines, row, column, position = [""], 0, 0, 0
    while position < len(text):
        match = _CONTROL.match(text, position)
        if match is not None:
            position = match.end()
            if match[2] == "A":
                row -= int(match[1] or 1)
                assert row >= 0
            elif match[2] == "K":
                lines[row] = ""
            else:
                assert match[2] == "m", match[0]
            continue
        if text[position] == "\n":
            row, column = row + 1, 0
            lines.extend([""] * (row + 1 - len(lines)))
        elif text[position] == "\r":
            column = 0
        else:
            lines[row] = lines[row][:column].ljust(column) + text[position] + lines[row][column + 1 :]
            column += 1
        position += 1
    return [line.rstrip() for line in lines]
