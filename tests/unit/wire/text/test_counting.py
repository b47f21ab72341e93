"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from wire.text.counting import counted


@pytest.mark.parametrize(("number", "text"), [(0, "0 weight files"), (1, "1 weight file"), (2, "2 weight files")])
def test_only_one_is_singular(number: int, text: str) -> None:
    assert counted(number, "weight file") == text
