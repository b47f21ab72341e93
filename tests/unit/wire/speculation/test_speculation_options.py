"""What `--speculator` may name."""

from __future__ import annotations

from pathlib import Path

import pytest

from wire.speculation.options import check_speculation


def test_a_folder_that_drafts_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("./nowhere", "~/drafter"):
        with pytest.raises(ValueError, match=f"`--speculator` {place}: no such directory"):
            check_speculation(place, None, 1, ValueError)
    (tmp_path / "drafter").mkdir()
    for value in (None, "mtp", str(tmp_path), "~/drafter", "org/name", "org/name@main"):
        check_speculation(value, None, 1, ValueError)
