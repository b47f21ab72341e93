from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from wire import model_files
from wire.model_files import (
    check_small_file,
    generating,
    length_limit,
    open_regular,
    read_config,
    read_object,
    read_optional_config,
    read_optional_object,
    read_text,
    read_tokenizer,
    token_text,
)

READERS = (read_object, read_optional_object, read_text, read_tokenizer, check_small_file)


class Refused(Exception):
    pass


def test_an_object_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_object(tmp_path / "config.json", Refused) == {"a": 1}
    assert read_optional_object(tmp_path / "config.json", Refused) == {"a": 1}


def test_the_thinker_of_a_model_that_speaks_is_its_config(tmp_path: Path) -> None:
    thinker = {"text_config": {"vocab_size": 9}, "eos_token_id": 3}
    fields = {
        "model_type": "qwen2_5_omni",
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "talker_config": {"hidden_size": 7},
        "quantization_config": {"quant_method": "fp8"},
        "thinker_config": thinker,
    }
    wanted = {
        "model_type": "qwen2_5_omni_thinker",
        "dtype": "bfloat16",
        "quantization_config": {"quant_method": "fp8"},
        **thinker,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert read_config(tmp_path / "config.json", Refused) == wanted
    assert read_optional_config(tmp_path / "config.json", Refused) == wanted
    assert read_optional_config(tmp_path / "absent.json", Refused) == {}
    named = generating({**fields, "thinker_config": {"model_type": "other"}})
    assert named["model_type"] == "other"
    assert generating({"model_type": "llama", "thinker_config": None}) == {
        "model_type": "llama",
        "thinker_config": None,
    }


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
    monkeypatch.setattr(model_files, "MAX_BYTES", 64 if text == "is larger than" else 2**20)
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (read_object, read_optional_object):
        with pytest.raises(Refused, match=text) as caught:
            read(path, Refused)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("read", READERS)
def test_only_regular_files_are_read_through_links_too(tmp_path: Path, read: Callable[..., Any]) -> None:
    """A pipe would be waited for, a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    for name, target in (("device.json", "/dev/zero"), ("pipe.json", "pipe"), ("tty.json", "/dev/null")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(Refused, match=rf"^\S+{name} is not a regular file$"):
            read(tmp_path / name, Refused)
        with pytest.raises(Refused, match="is not a regular file"):
            open_regular(tmp_path / name, Refused)
    (tmp_path / "blob").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob")
    read(tmp_path / "config.json", Refused)


@pytest.mark.parametrize("read", READERS)
def test_a_large_file_is_refused_by_its_size_before_it_is_read(tmp_path: Path, read: Callable[..., Any]) -> None:
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(5 * 2**30)
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match=r"config\.json is larger than \d+ MiB$"):
            read(path, Refused)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_a_file_that_grows_while_it_is_read_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "MAX_BYTES", 16)
    with pytest.raises(Refused, match="is larger than"):
        read_text(Path("/proc/self/status"), Refused)  # its size is told as 0


def test_text_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"ab\xff")
    with pytest.raises(Refused, match=r"is not UTF-8 text: invalid start byte at byte 2$"):
        read_text(tmp_path / "chat_template.jinja", Refused)


@pytest.mark.parametrize(("value", "limit"), [(2048, 2048), (2048.0, 2048), (10**30, None), (0, None), (True, None),
                                              ("9", None), (None, None)])  # fmt: skip
def test_length_limit(value: Any, limit: int | None) -> None:
    assert length_limit(value) == limit


@pytest.mark.parametrize(("token", "text"), [("</s>", "</s>"), ({"content": "</s>"}, "</s>"), ({}, None), (None, None)])
def test_token_text(token: Any, text: str | None) -> None:
    assert token_text(token) == text


def test_a_file_that_readers_would_wait_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As /proc/kmsg is, where there is nothing new: a regular file by its mode."""
    reading, writing = os.pipe2(os.O_NONBLOCK)
    monkeypatch.setattr(model_files, "open_regular", lambda path, error: os.fdopen(os.dup(reading), "rb"))
    try:
        for read in (read_object, read_text, read_tokenizer):
            with pytest.raises(Refused, match=r"^config\.json is not a regular file$"):
                read(Path("config.json"), Refused)
    finally:
        os.close(reading)
        os.close(writing)
