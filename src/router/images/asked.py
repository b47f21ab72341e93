"""Images that a request asks for: where they are named, and what a data URL holds."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field

from router.errors import ValidationError
from wire.images.decoding import Detail
from wire.images.prepared import PreparedImage

_BEGIN = "![]("
_SCHEMES = ("http://", "https://", "data:")
_DATA = "data:"
_BASE64 = "base64,"


@dataclass(eq=False, slots=True)
class AskedImage:
    """An image by its URL. `prepared` once it has been read: the choices of a request share it."""

    url: str
    detail: Detail = "auto"
    prepared: PreparedImage | None = field(default=None, repr=False)


def invalid(reason: str) -> ValidationError:
    """The refusal of a file that cannot be used as an image, in TGI's words."""
    return ValidationError(f"invalid image: {reason}")


def split_markers(text: str, most: int) -> tuple[list[str], list[str]]:
    """The texts around the markers `![](url)` of a prompt, one more than there are markers, and the URLs.

    A marker has an URL of http, https or data; whatever else looks like one stays text, also one with a description in
    its brackets. Ends after `most` + 1 markers.
    """
    texts: list[str] = []
    urls: list[str] = []
    done = 0
    while len(urls) <= most:
        begins = [place for scheme in _SCHEMES if (place := text.find(_BEGIN + scheme, done)) >= 0]
        begin = min(begins, default=-1)
        end = text.find(")", begin) if begins else -1
        if end < 0:
            break
        texts.append(text[done:begin])
        urls.append(text[begin + len(_BEGIN) : end])
        done = end + 1
    texts.append(text[done:])
    return texts, urls


def data_of(url: str, max_bytes: int) -> bytes | None:
    """The bytes of a data URL; None for other URLs. Takes milliseconds for megabytes. Raises ValidationError."""
    if not url.startswith(_DATA):
        return None
    _, separator, rest = url[len(_DATA) :].partition(";")
    if not separator or ";" in rest or not rest.startswith(_BASE64):
        raise ValidationError(f"invalid image content: {url[:50]}")
    num_encoded = len(rest) - len(_BASE64) - rest[-2:].count("=")
    check_size(num_encoded * 3 // 4, max_bytes)
    try:
        encoded = rest[len(_BASE64) :].encode("ascii")
        data = base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValidationError("base64 encoding is invalid: it has other characters, or not their number") from None
    check_size(len(data), max_bytes)
    return data


def check_size(num_bytes: int, max_bytes: int) -> None:
    """Raises ValidationError, in TGI's words."""
    if num_bytes > max_bytes:
        raise ValidationError(f"Image size {num_bytes} bytes exceeds maximum allowed size of {max_bytes} bytes")
