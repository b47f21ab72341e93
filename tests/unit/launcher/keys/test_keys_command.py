"""`launcher keys new NAME`."""

from __future__ import annotations

from pathlib import Path

import pytest

from launcher.keys.command import run_keys
from launcher.keys.config import KeysConfig
from wire.keys import digest_of, read_keys


def test_a_row_is_for_the_file_and_the_key_is_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_keys(KeysConfig(action="new", name="alice")) == 0
    printed = capsys.readouterr()
    key = printed.err.split()[-1]
    assert key.startswith("tk-") and key not in printed.out
    (tmp_path / "keys.yaml").write_text(printed.out)
    (found,) = read_keys(tmp_path / "keys.yaml")
    assert (found.name, found.digest) == ("alice", digest_of(key.encode()))


def test_a_name_that_no_file_may_have_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_keys(KeysConfig(action="new", name="a b")) == 1
    printed = capsys.readouterr()
    assert not printed.out and "error: the name must be" in printed.err
