"""Options' names and values as flags and variables, both ways, and the nearest known name."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any


def flag_of(name: str) -> str:
    """`max_batch_size` → `--max-batch-size`."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """`max_batch_size` → `MAX_BATCH_SIZE`."""
    return name.upper()


def spell(value: Any) -> str:
    """A value as the command line spells it; floats as TGI prints them (1.0 → `1`)."""
    if isinstance(value, enum.Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)


def to_argv(values: Mapping[str, Any]) -> list[str]:
    """Write options as flags: None and False as nothing, lists repeated."""
    argv: list[str] = []
    for name, value in values.items():
        flag = flag_of(name)
        if value is True:
            argv.append(flag)
        elif value is None or value is False:
            continue
        else:
            for item in value if isinstance(value, list | tuple) else [value]:
                # One word, so that a value that starts with a dash cannot be taken for an option.
                text = spell(item)
                argv += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return argv


def to_environment(values: Mapping[str, Any]) -> dict[str, str]:
    """Write options as variables: None and False as nothing, `True` as TGI's shards expect, lists with commas."""
    said = {name: value for name, value in values.items() if value is not None and value is not False}
    return {variable_of(name): _variable(value) for name, value in said.items()}


def _variable(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(map(spell, value))
    return str(value) if isinstance(value, bool) else spell(value)


def closest(name: str, known: Iterable[str], *, letters_per_edit: int) -> str | None:
    """Return the known name probably meant, if any.

    One letter may be wrong, missing, extra or swapped for each `letters_per_edit`; case, dashes and underscores do not
    count.
    """
    given, best, fewest = _squashed(name), None, math.inf
    for one in known:
        meant = _squashed(one)
        most = len(meant) // letters_per_edit
        if abs(len(meant) - len(given)) <= most and (edits := _edits(given, meant, most)) <= most and edits < fewest:
            best, fewest = one, edits
    return best


def _squashed(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _edits(a: str, b: str, most: int) -> int:
    """Count edits: Levenshtein's, and swaps of adjacent letters; if there are more than `most`, not exactly."""
    before: list[int] = []
    above = list(range(len(b) + 1))
    for i, letter in enumerate(a, start=1):
        row = [i]
        for j, other in enumerate(b, start=1):
            edits = min(above[j] + 1, row[j - 1] + 1, above[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == b[j - 2] and a[i - 2] == other:
                edits = min(edits, before[j - 2] + 1)
            row.append(edits)
        if min(min(above) + 1, *row) > most:  # and so in all later rows; a swap continues from the row before
            return most + 1
        before, above = above, row
    return above[-1]
