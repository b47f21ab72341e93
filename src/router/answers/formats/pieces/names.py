"""The name of a function in front of a mark."""

from __future__ import annotations

import re

from router.answers.formats.format import CallReader
from router.answers.formats.source import Steps

_NAME = re.compile(r"""[^\s<>"'{}()\[\],\ud800-\udfff]+""")


def name_before(reader: CallReader, *marks: str) -> Steps[tuple[str, str]]:
    """Read a name and its mark; ("", ""): none."""
    encoded = {reader.mark(mark): mark for mark in marks}
    found = yield from reader.source.until(*encoded)
    if found is None or not _NAME.fullmatch(name := found[0].strip()):
        return "", ""
    return name, encoded[found[1]]
