"""What the formats of strings let be written, as docs/compatibility.md says: some are looser than their standards."""

from __future__ import annotations

import json

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.worker import _END_ID, _Bytes
from wire.grammar import compile_grammar

_BYTES = LLTokenizer(TokenizerWrapper(_Bytes()))


@pytest.mark.parametrize(
    ("name", "written", "excluded"),
    [
        ("date", ["2024-02-29", "2023-02-29"], ["2024-02-30", "2024-04-31", "2024-13-01"]),
        ("time", ["12:00:00Z", "12:00:60z"], ["24:00:00Z", "12:00:00", "12:00:00+24:00"]),
        ("date-time", ["2024-01-01t12:00:60z", "2023-02-29T12:00:00Z"], ["2024-01-01 12:00:00Z"]),
        ("duration", ["P1W", "P1DT2H"], ["P", "PT", "P1Y2W", "P1.5D"]),
        ("hostname", ["a.b", ".".join(["a" * 60] * 5)], ["a" * 64, "-a", "a-", "a_b", "a."]),
        ("email", ["a@b", "a@[1.2.3.4]"], ["a..b@c.de", "a@-b.de", '"a b"@c.de']),
        ("ipv4", ["1.2.3.4"], ["256.1.1.1", "01.2.3.4", "1.2.3"]),
        ("ipv6", ["::", "1::2"], ["1::2::3", "1:2:3:4:5:6:7:8:9", "12345::", "::ffff:1.2.3.4"]),
        ("uri", ["a:b", "http://[::1]/"], ["/x", "http://a b", "http://%zz"]),
        ("uuid", ["2EB8AA08-aa98-11ea-b4aa-73b441d16380"], ["2eb8aa08aa9811eab4aa73b441d16380"]),
    ],
)
def test_what_may_be_written(name: str, written: list[str], excluded: list[str]) -> None:
    schema = json.dumps({"type": "string", "format": name})
    for text in written + excluded:
        matcher = compile_grammar("json", schema, _BYTES, [_END_ID])
        is_written = matcher.consume_tokens(list(json.dumps(text).encode())) and matcher.is_accepting()
        assert is_written == (text in written), text
