"""Markers in prompts and what data URLs hold."""

from __future__ import annotations

import base64
import random
import re

import pytest

from router.errors import ValidationError
from router.images import asked
from router.images.asked import data_of, split_markers


@pytest.mark.parametrize(
    ("text", "texts", "urls"),
    [
        ("", [""], []),
        ("a ![](http://x/y.png) b", ["a ", " b"], ["http://x/y.png"]),
        ("![](https://x)![](data:;base64,AA==)", ["", "", ""], ["https://x", "data:;base64,AA=="]),
        ("![alt](http://x) b", ["![alt](http://x) b"], []),
        ("![](pictures/x.png) ![](#x)", ["![](pictures/x.png) ![](#x)"], []),
        ("![](http://x", ["![](http://x"], []),
        ("![]( ![](http://x) )", ["![]( ", " )"], ["http://x"]),
        ("![](http://a ![](http://b)", ["", ""], ["http://a ![](http://b"]),
    ],
)
def test_markers(text: str, texts: list[str], urls: list[str]) -> None:
    assert split_markers(text, 8) == (texts, urls)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://x", "HTTP://x", "http:x", "C:/x.png", "a" * 32 + ":x", " http://x", "<http://x>",
     "\n\thttps://x", "\u00a0data:;base64,AA=="],
)  # fmt: skip
def test_urls_that_are_no_images(url: str) -> None:
    for text in (f"![]({url})", f"![](http://x) and ![]({url}) behind"):
        with pytest.raises(ValidationError, match=rf"invalid image content: {re.escape(url)}$"):
            split_markers(text, 8)


def test_markers_over_the_borders_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a![](http://x)bc![]( ![](data:;base64,AA==)![](https://y)"
    expected = split_markers(text, 8)
    assert len(expected[1]) == 3
    for piece in range(1, 20):
        monkeypatch.setattr(asked, "_PIECE", piece)
        assert split_markers(text, 8) == expected


def test_markers_are_not_looked_for_beyond_the_limit() -> None:
    texts, urls = split_markers("![](http://x)" * 100_000, 3)
    assert len(urls) == 4 and len(texts) == 5
    assert split_markers("![](" * 1_000_000, 3)[1] == []


def test_data_urls() -> None:
    for encoded in ("aGVsbG8=", "aGVsbG8"):  # padding may be absent
        assert data_of(f"data:image/png;base64,{encoded}", 100) == b"hello"
    assert data_of("http://x", 100) is None


@pytest.mark.parametrize("num_bytes", [0, 1, 2, 3, 20, 23, 24, 25, 26, 47, 48, 49, 1000])
def test_long_ones_are_decoded_in_pieces(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asked, "_PIECE", 32)
    data = random.Random(num_bytes).randbytes(num_bytes)
    encoded = base64.b64encode(data).decode()
    for padding in range(encoded.count("=") + 1):
        kept = encoded[: len(encoded) - padding]
        assert data_of(f"data:;base64,{kept}", 10_000) == data
    for wrong in (
        f"{encoded}=",
        f"={encoded}",
        f"{encoded}AA==A",
        encoded[:30] + "=" + encoded[30:] + "AAA",
        f"{encoded}\n",
    ):
        with pytest.raises(ValidationError, match="base64 encoding is invalid"):
            data_of(f"data:;base64,{wrong}", 10_000)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("data:image/png,AAAA", "invalid image content: data:image/png,AAAA"),
        ("data:image/png;charset=x;base64,AAAA", "invalid image content"),
        ("data:image/png;hex,AAAA", "invalid image content"),
        ("data:image/png;base64,AA*A", "base64 encoding is invalid"),
        ("data:image/png;base64,A", "base64 encoding is invalid"),
        ("data:image/png;base64,ÄÄÄÄ", "base64 encoding is invalid"),
        (
            "data:;base64," + base64.b64encode(bytes(101)).decode(),
            "Image size 101 bytes exceeds maximum allowed size of 100 bytes",
        ),
    ],
)
def test_what_is_no_image(url: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        data_of(url, 100)
