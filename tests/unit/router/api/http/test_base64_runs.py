"""Bodies with files in base64 are parsed as all others."""

from __future__ import annotations

import orjson
import pytest

from router.api.errors import BodyError
from router.api.http.base64_runs import Base64Runs
from router.api.http.body import parse_json

LONG = "QUJD" * 70_000
OTHER = "eHl6" * 70_000 + "eA=="


@pytest.mark.parametrize(
    "value",
    [
        {"url": f"data:image/png;base64,{LONG}"},
        {"inputs": f"a ![](data:image/png;base64,{LONG}) é ![](data:;base64,{OTHER})"},
        [f";base64,{LONG}", {"x": [f";base64,{OTHER}", 1, None, True, 2.5]}, ";base64,AAAA"],
        {f"name;base64,{LONG}": [f";base64,{LONG};base64,{LONG}"]},
        f';base64,{LONG}\n\\"',
    ],
)
def test_they_are_parsed_as_they_are(value: object) -> None:
    assert parse_json(orjson.dumps(value)) == value


def test_long_runs_alone_are_set_apart() -> None:
    raw = orjson.dumps({"a": f";base64,{LONG}", "b": ";base64,QUJD"})
    rest = Base64Runs(raw).rest
    assert len(rest) < 200 and b"QUJD" in rest
    assert Base64Runs(b"{}").rest == b"{}"


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a": ";base64,%s' % LONG.encode(), b'{"a": ;base64,%s}' % LONG.encode(),
        b'{"a": ";base64,%s\n"}' % LONG.encode(), b";base64,%s" % LONG.encode(),
    ],
)  # fmt: skip
def test_wrong_syntax_stays_wrong(raw: bytes) -> None:
    with pytest.raises(BodyError) as caught:
        parse_json(raw)
    assert caught.value.status == 400
