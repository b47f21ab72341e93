"""Some changed fields of every type: the tokens are transformers', or the start is refused.

`make differential` has all of them.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from differential.compare import base_fields, compare, with_change
from differential.fields import changes
from differential.known import KNOWN, TYPES, is_known

PER_TYPE = 2


def sample(model_type: str, base: dict[str, Any]) -> list[tuple[str, Any]]:
    """The same ones in every run."""
    found = [(name, value) for name, value in changes(model_type, base) if not is_known(model_type, name)]
    return sorted(found, key=lambda change: zlib.crc32(f"{model_type} {change}".encode()))[:PER_TYPE]


@pytest.mark.long
@pytest.mark.parametrize("model_type", TYPES)
def test_a_changed_field_counts_as_in_transformers_or_is_refused(model_type: str, tmp_path: Path) -> None:
    base = base_fields(model_type)
    for name, value in sample(model_type, base):
        for form, outcome in compare(with_change(base, name, value), tmp_path / "m").items():
            assert outcome.kind in ("equal", "refused", "invalid"), f"{name}={value!r}, {form}: {outcome.detail}"


def test_a_difference_that_is_known_has_a_reason_and_a_type() -> None:
    for (model_type, _), reason in KNOWN.items():
        assert model_type in TYPES and reason
