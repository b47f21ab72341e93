"""Which patterns may take memory without end."""

from __future__ import annotations

import pytest

from wire.text.patterns import calls_itself


@pytest.mark.parametrize(
    "pattern",
    [
        "(?R)", "a(?1)", "(?-1)", "(?+1)", "(?P<n>a(?&n)?)", "(?P>n)", r"\\(?R)", "(?x)( ?R)", "(?R )",
        "(?P >n)(?P<n>a)", "(?ix-m:a)", "[a](?R)[b]",
    ],
)  # fmt: skip
def test_patterns_that_call_themselves(pattern: str) -> None:
    assert calls_itself(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "^a", "(?i)a", "(?-i:a)", "(?:a)", "(?P<n>a)(?P=n)", r"\(?1", "(?<=a)b", "^[a-z(?0-9)]+$", r"[^](?&n)]",
        r"[\](?R)]",
    ],
)  # fmt: skip
def test_others(pattern: str) -> None:
    assert not calls_itself(pattern)
