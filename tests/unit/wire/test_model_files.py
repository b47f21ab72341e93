from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wire import model_files
from wire.model_files import length_limit, read_object, read_optional_object, token_text


class Refused(Exception):
    pass


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_object(tmp_path / "config.json", Refused) == {"a": 1}
    assert read_optional_object(tmp_path / "config.json", Refused) == {"a": 1}


def test_only_an_optional_file_may_be_absent(tmp_path: Path) -> None:
    assert read_optional_object(tmp_path / "absent.json", Refused) == {}
    with pytest.raises(Refused, match=r"^cannot read .*absent\.json: No such file"):
        read_object(tmp_path / "absent.json", Refused)


def test_a_file_that_cannot_be_looked_at_is_not_absent(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match=r"^cannot read .*config\.json: Not a directory"):
        read_optional_object(tmp_path / "file" / "config.json", Refused)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "does not hold a JSON object"),
        (b'{"a": "' + b"x" * 64 + b'"}', "is larger than"),
    ],
)
def test_what_is_no_object_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, text: str
) -> None:
    monkeypatch.setattr(model_files, "_MAX_BYTES", 64 if text == "is larger than" else 2**20)
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (read_object, read_optional_object):
        with pytest.raises(Refused, match=text) as caught:
            read(path, Refused)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("value", "limit"), [(2048, 2048), (2048.0, 2048), (10**30, None), (0, None), (True, None),
                                              ("9", None), (None, None)])  # fmt: skip
def test_length_limit(value: Any, limit: int | None) -> None:
    assert length_limit(value) == limit


@pytest.mark.parametrize(("token", "text"), [("</s>", "</s>"), ({"content": "</s>"}, "</s>"), ({}, None), (None, None)])
def test_token_text(token: Any, text: str | None) -> None:
    assert token_text(token) == text
