"""Reads `multipart/form-data` as it comes, with python-multipart: one file to the disk, the other fields to memory."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.api.errors import BodyError
from router.errors import ValidationError

_MOST_FIELDS, _LONGEST_FIELD, _LONGEST_HEADER = 16, 1024, 8192
_LONGEST_NAME = 255
_BOUNDARY = re.compile(rb"[ -~]{1,70}")
# Its warnings are about what a client has sent, and the answer says so.
logging.getLogger("python_multipart").setLevel(logging.ERROR)


@dataclass
class Form:
    """What a form holds besides its file."""

    filename: str | None = None
    """None: it has no file."""
    fields: dict[str, str] = field(default_factory=dict)


def boundary_of(content_type: str) -> bytes:
    """Raises BodyError."""
    kind, options = parse_options_header(content_type.encode("latin-1"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary):
        text = "Expected request with `Content-Type: multipart/form-data`, with the file as its field `file`"
        raise BodyError(415, "unsupported_media_type", text, reason="content_type")
    return boundary


async def read_form(body: AsyncIterator[bytes], boundary: bytes, write: Callable[[bytes], object]) -> Form:
    """Read a whole form; `write` gets the file's bytes. Raises ValidationError."""
    reader = _Reader(write)
    parser = MultipartParser(
        boundary,
        {
            "on_part_begin": reader.on_part_begin,
            "on_header_field": reader.on_header_field,
            "on_header_value": reader.on_header_value,
            "on_header_end": reader.on_header_end,
            "on_headers_finished": reader.on_headers_finished,
            "on_part_data": reader.on_part_data,
            "on_part_end": reader.on_part_end,
            "on_end": reader.on_end,
        },
        max_header_size=_LONGEST_HEADER,
    )
    try:
        async for piece in body:
            parser.write(piece)
    except FormParserError as error:
        raise ValidationError(f"not a form: {error}") from None
    if not reader.is_whole:
        raise ValidationError("the form ends before its closing boundary")
    return reader.form


class _Reader:
    """Takes the parts of a form from the parser, whose memory it bounds."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self.form = Form()
        self.is_whole = False
        self._write = write
        self._header = self._value = b""
        self._disposition = b""
        self._name: str | None = None  # of a field that goes to memory; None: the file
        self._text = b""

    def on_part_begin(self) -> None:
        self._disposition = self._text = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def on_header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = self._value
        self._header = self._value = b""

    def on_headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        if b"name" not in options:
            raise ValidationError("a part of the form has no name")
        name = options[b"name"].decode("utf-8", errors="replace")
        if name != "file":
            if len(self.form.fields) == _MOST_FIELDS:
                raise ValidationError(f"the form has more than {_MOST_FIELDS} fields")
            self._name = name
            return
        if self.form.filename is not None:
            raise ValidationError("the form has two fields `file`: send one", param="file")
        if b"filename" not in options:
            raise ValidationError("`file` must be a file with a name", param="file")
        self._name = None
        self.form.filename = options[b"filename"].decode("utf-8", errors="replace")[-_LONGEST_NAME:]

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._name is None:
            self._write(data[start:end])
            return
        self._text += data[start:end]
        if len(self._text) > _LONGEST_FIELD:
            raise ValidationError(f"`{self._name[:80]}` is too long", param=self._name[:80])

    def on_part_end(self) -> None:
        if self._name is not None:
            self.form.fields[self._name] = self._text.decode("utf-8", errors="replace")

    def on_end(self) -> None:
        self.is_whole = True
