"""Pictures that go with a prompt: files as data URLs, addresses as they are."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

_KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif"}
_MOST_BYTES = 20 * 2**20


class PictureError(Exception):
    """The picture cannot be sent; the text says why."""


def picture_part(name: str) -> dict[str, Any]:
    """Return the part of a message for a file or the address of one. Raises PictureError."""
    url = name if name.startswith(("http://", "https://")) else _data_url(Path(os.path.expanduser(name)))
    return {"type": "image_url", "image_url": {"url": url}}


def _data_url(path: Path) -> str:
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise PictureError(f"{path} is larger than {_MOST_BYTES >> 20} MiB")
        data = path.read_bytes()
    except OSError as error:
        raise PictureError(f"{path} cannot be read: {error.strerror}") from None
    kind = next((kind for start, kind in _KINDS.items() if data.startswith(start)), None)
    if kind is None and data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        kind = "webp"
    if kind is None:
        raise PictureError(f"{path} is not a PNG, JPEG, WebP or GIF picture")
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
