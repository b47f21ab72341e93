"""Counts of tokens and bytes as people write them: `8k`, `1.5GiB`."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Literal

Unit = Literal["tokens", "bytes"]

MEANING = (
    "A number of tokens may end in k or M, powers of 1024 (8k is 8192); a number of bytes in KiB, MiB or GiB, powers "
    "of 1024, or in kB, MB or GB, powers of 1000 (2MB is 2000000)."
)
_EXPECTED: dict[Unit, str] = {
    "tokens": "expected a whole number of tokens, such as 8192 or 8k",
    "bytes": "expected a whole number of bytes, such as 2000000, 2MB or 1.5GiB",
}
_SIZE = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?) ?([kmgt]i?)(b?)", re.IGNORECASE)
_POWERS = "kmgt"


def count_of(text: str, unit: Unit) -> int:
    """The number that a text with a suffix stands for. Raises ValueError with the reason."""
    match = _SIZE.fullmatch(text)
    if match is None or (match[3] and unit == "tokens"):
        raise ValueError(_EXPECTED[unit])
    prefix = match[2].lower()
    # As GNU's tools have it: k alone and Ki are 1024, only kB is 1000.
    base = 1000 if match[3] and len(prefix) == 1 else 1024
    count = Fraction(match[1]) * base ** (_POWERS.index(prefix[0]) + 1)
    if count.denominator != 1:
        raise ValueError(_EXPECTED[unit])
    return int(count)
