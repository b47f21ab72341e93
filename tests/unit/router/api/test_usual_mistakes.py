"""The table of requests in docs/troubleshooting.md, row by row: the request as it stands, its answer, its status."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest
from router_fakes import Router, message_of

PAGE = Path(__file__).parents[4] / "docs" / "troubleshooting.md"
ROW = re.compile(
    r"^\| (?P<title>[^|]+) \| `(?P<method>GET|POST) (?P<path>\S+?)(?: (?P<body>[^|]+?))?` "
    r"\| `` ?(?P<answer>.+?) ?`` \| (?P<status>\d+) \|$",
    re.M,
)
MOST = 400
"""Characters of an answer that is one line to read."""


class Row(NamedTuple):
    title: str
    method: str
    path: str
    body: str
    answer: str
    status: int


ROWS = [
    Row(m["title"], m["method"], m["path"], m["body"] or "", m["answer"], int(m["status"]))
    for m in ROW.finditer(PAGE.read_text())
]


@pytest.mark.parametrize("row", ROWS, ids=[row.title for row in ROWS])
async def test_row(router: Router, row: Row) -> None:
    headers = {"content-type": "application/json"} if row.body.startswith(("{", "[")) else {}
    answer = await router.request(row.method, row.path, content=row.body.encode(), headers=headers)
    assert (message_of(answer), answer.status_code) == (row.answer, row.status)
    assert len(row.answer) < MOST and "\n" not in row.answer
    router.assert_idle()


def test_the_page_has_a_row_for_every_usual_mistake() -> None:
    section = PAGE.read_text().partition("\n## Usual mistakes in requests\n")[2].partition("\n## ")[0]
    assert len(ROWS) == section.count("\n| ") - 1
    assert len(ROWS) >= 30
