"""Reads `multipart/form-data` as it comes: one file to the disk, the other fields to memory."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable, Callable
from dataclasses import dataclass, field
from email.message import Message

from router.api.errors import BodyError
from router.errors import ValidationError

_MOST_FIELDS, _LONGEST_FIELD, _LONGEST_HEAD = 16, 1024, 8192
_LONGEST_NAME = 255
_BOUNDARY = re.compile(r"[ -~]{1,70}")


@dataclass
class Form:
    """What a form holds besides its file."""

    filename: str | None = None
    """None: it has no file."""
    fields: dict[str, str] = field(default_factory=dict)


def boundary_of(content_type: str) -> bytes:
    """Raises BodyError."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    is_form = header.get_content_type() == "multipart/form-data"
    if not is_form or not isinstance(boundary, str) or not _BOUNDARY.fullmatch(boundary):
        text = "Expected request with `Content-Type: multipart/form-data`, with the file as its field `file`"
        raise BodyError(415, "unsupported_media_type", text, reason="content_type")
    return boundary.encode()


async def read_form(body: AsyncIterable[bytes], boundary: bytes, write: Callable[[bytes], object]) -> Form:
    """Read a whole form; `write` gets the file's bytes. Raises ValidationError."""
    reader = _Reader(boundary, write)
    async for piece in body:
        reader.feed(piece)
    if not reader.is_whole:
        raise ValidationError("the form ends before its closing boundary")
    return reader.form


class _Reader:
    """Cuts a form into its parts at their boundaries."""

    def __init__(self, boundary: bytes, write: Callable[[bytes], object]) -> None:
        self.form = Form()
        self.is_whole = False
        self._mark = b"\r\n--" + boundary
        self._write = write
        self._unread = bytearray(b"\r\n")  # so that the first boundary looks like the others
        self._is_in_head = False
        self._part: _Part | None = None  # None: before the first boundary

    def feed(self, piece: bytes) -> None:
        if self.is_whole:
            return  # what follows the last boundary means nothing
        self._unread += piece
        while not self.is_whole and self._step():
            pass

    def _step(self) -> bool:
        """Read one part's head or content; return whether there may be more to read."""
        return self._read_head() if self._is_in_head else self._read_content()

    def _read_content(self) -> bool:
        at = self._unread.find(self._mark)
        end = at + len(self._mark)
        if at < 0:
            # The last bytes may be the beginning of a boundary.
            self._hand_on(len(self._unread) - len(self._mark))
            return False
        if len(self._unread) < end + 2:
            self._hand_on(at)
            return False
        self._hand_on(at)
        follows = bytes(self._unread[len(self._mark) : len(self._mark) + 2])
        if follows not in (b"--", b"\r\n"):
            raise ValidationError("a boundary of the form has text behind it")
        self._keep_field()
        del self._unread[: len(self._mark)]
        self.is_whole, self._is_in_head = follows == b"--", True
        return True

    def _read_head(self) -> bool:
        end = self._unread.find(b"\r\n\r\n")
        if end > _LONGEST_HEAD or (end < 0 and len(self._unread) > _LONGEST_HEAD):
            raise ValidationError("the head of a part of the form is too long")
        if end < 0:
            return False
        self._part = self._part_of(bytes(self._unread[:end]))
        del self._unread[: end + 4]
        self._is_in_head = False
        return True

    def _part_of(self, head: bytes) -> _Part:
        disposition = Message()
        for line in head.decode("utf-8", errors="replace").split("\r\n"):
            header, _, value = line.partition(":")
            if header.strip().lower() == "content-disposition":
                disposition["content-disposition"] = value.strip()
        name = disposition.get_param("name", header="content-disposition")
        if not isinstance(name, str):
            raise ValidationError("a part of the form has no name")
        filename = disposition.get_filename()
        if name != "file":
            if len(self.form.fields) == _MOST_FIELDS:
                raise ValidationError(f"the form has more than {_MOST_FIELDS} fields")
            return _Part(name)
        if self.form.filename is not None:
            raise ValidationError("the form has two fields `file`: send one", param="file")
        if filename is None:
            raise ValidationError("`file` must be a file with a name", param="file")
        self.form.filename = filename[-_LONGEST_NAME:]
        return _Part(name, is_file=True)

    def _hand_on(self, num_bytes: int) -> None:
        """Hand on bytes of the running part."""
        if num_bytes <= 0:
            return
        content = bytes(self._unread[:num_bytes])
        del self._unread[:num_bytes]
        if self._part is None:
            return
        if self._part.is_file:
            self._write(content)
            return
        self._part.text += content
        if len(self._part.text) > _LONGEST_FIELD:
            raise ValidationError(f"`{self._part.name[:80]}` is too long", param=self._part.name[:80])

    def _keep_field(self) -> None:
        if (part := self._part) is not None and not part.is_file:
            self.form.fields[part.name] = part.text.decode("utf-8", errors="replace")


@dataclass
class _Part:
    name: str
    is_file: bool = False
    text: bytes = b""
