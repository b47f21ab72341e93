"""Images that requests name, and what data URLs hold."""

from __future__ import annotations

import binascii
import re
from dataclasses import dataclass, field

from router.errors import ImageError
from wire.images.prepared import Detail, PreparedImage

_BEGIN = "![]("
_LONGEST_SCHEME = 32
_MOST_BEFORE = 8  # white space, and Markdown's angle bracket: refused with the URL rather than read as text
_MARKER = re.compile(rf"!\[\]\((?=[\s<]{{0,{_MOST_BEFORE}}}[A-Za-z][A-Za-z0-9+.-]{{0,{_LONGEST_SCHEME - 1}}}:)")
_LONGEST_BEGIN = len(_BEGIN) + _MOST_BEFORE + _LONGEST_SCHEME + 1
_SERVED = ("http://", "https://", "data:")
_DATA = "data:"
_BASE64 = "base64,"
_PIECE = 1 << 17  # characters, a multiple of four; they take a fraction of a millisecond


@dataclass(eq=False, slots=True)
class AskedImage:
    """An image by URL; once read, choices share `prepared`."""

    url: str
    detail: Detail = "auto"
    prepared: PreparedImage | None = field(default=None, repr=False)


def invalid(reason: str) -> ImageError:
    """Return TGI's refusal of an unusable image."""
    return ImageError(f"invalid image: {reason}")


def split_markers(text: str, most: int) -> tuple[list[str], list[str]]:
    """Split a prompt at its `![](url)` markers, into texts and URLs, up to `most` + 1.

    Other things stay text, also with a description or no scheme.

    Raises:
        ValidationError: The scheme is not http, https or data.
    """
    texts: list[str] = []
    urls: list[str] = []
    done = 0
    while len(urls) <= most:
        marker = _next_marker(text, done)
        end = text.find(")", marker.end()) if marker else -1
        if marker is None or end < 0:
            break
        begin = marker.start()
        texts.append(text[done:begin])
        url = text[begin + len(_BEGIN) : end]
        if not url.startswith(_SERVED):
            raise _no_image(url)
        urls.append(url)
        done = end + 1
    texts.append(text[done:])
    return texts, urls


def _next_marker(text: str, begin: int) -> re.Match[str] | None:
    """In pieces, between which other threads run."""
    for place in range(begin, len(text), _PIECE):
        found = _MARKER.search(text, place, place + _PIECE + _LONGEST_BEGIN)
        if found is not None:
            return found
    return None


def data_of(url: str, max_bytes: int) -> bytes | None:
    """Return a data URL's bytes, or None; milliseconds for megabytes."""
    if not url.startswith(_DATA):
        return None
    separator = url.find(";")
    begin = separator + 1 + len(_BASE64)
    if separator < 0 or not url.startswith(_BASE64, separator + 1) or url.find(";", begin) >= 0:
        raise _no_image(url)
    num_padding = url[max(begin, len(url) - 2) :].count("=")
    end = len(url) - num_padding
    check_size((end - begin) * 3 // 4, max_bytes)
    data = bytearray()
    try:
        if num_padding > -(end - begin) % 4 or url.find("=", begin, end) >= 0:
            raise ValueError("padding where none is due")
        # In pieces: other threads, that of the event loop among them, run in between only.
        for place in range(begin, end, _PIECE):
            piece = url[place : min(place + _PIECE, end)]
            data += binascii.a2b_base64(piece + "=" * (-len(piece) % 4), strict_mode=True)
    except ValueError:  # binascii.Error is one
        raise ImageError("base64 encoding is invalid: it has other characters, or not their number") from None
    return bytes(data)


def _no_image(url: str) -> ImageError:
    """In TGI's words."""
    return ImageError(f"invalid image content: {url[:50]}")


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raises ValidationError, in TGI's words."""
    if num_bytes > max_bytes:
        raise ImageError(f"Image size {num_bytes} bytes exceeds maximum allowed size of {max_bytes} bytes")
