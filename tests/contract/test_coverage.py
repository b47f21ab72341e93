"""No type of transformers that makes text is missing from the documented table, whatever its version brings."""

from __future__ import annotations

from pathlib import Path

from parity.table import all_types, read_rows

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_every_type_has_a_row_and_every_refusal_a_reason() -> None:
    rows = read_rows(PAGE.read_text())
    assert set(rows) == set(all_types())
    assert [row.model_type for row in rows.values() if row.runner in ("refused", "–") and not row.note] == []
