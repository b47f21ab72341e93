"""Look-ahead of patterns: what can be written is what Python's expressions match."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from router.grammar.look_ahead import _REWRITTEN, without_look_ahead
from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()))
EMAIL, DURATION, EMOJI = _REWRITTEN
TEXTS = (
    "a@b.cd", ".a@b.cd", "a..b@c.de", "a.b@c.de", "a.@b.cd", "o'a@b.cd", "a'@b.cd", "a@b..cd", "@b.cd", "a@b.c",
    "a-+_@b-c.d.ef",
    "P", "PT", "P1W", "P1WT1S", "P1Y2M3D", "P1Y3D", "P2MT1H", "PT1H2M3.5S", "PT2M", "PT3,5S", "P1D2M", "P1DT",
    "PT1H1S", "PT1S1H",
    "", "aB1", "abC1", "abcC1d", "abc1", "abCd", "abcdefG1", "(1A", "A1", "1)A|", "a|B1",
)  # fmt: skip
PATTERNS = (
    EMAIL, DURATION, r"^(?=.*[A-Z])(?=.*\d).{3,6}$", r"^(?=.{4,6}$)[a-zA-Z0-9]+$", r"^(?=[^)]*\d)(?=(a|A|\()).*$",
    r"^(?=a|b)(a|P).*",
)  # fmt: skip


def takes(schema: dict[str, Any], text: str) -> bool:
    checked = check("json", json.dumps(schema), TOKENIZER)
    assert "fault" not in checked, checked
    matcher = compile_grammar("json", checked["grammar"], TOKENIZER, [256])
    written = json.dumps(text, ensure_ascii=False).encode()
    return bool(matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_texts_that_can_be_written_are_those_that_match(pattern: str) -> None:
    found = [text for text in TEXTS if takes({"type": "string", "pattern": pattern}, text)]
    assert found == [text for text in TEXTS if re.search(pattern, text)]
    assert found


def test_zods_emoji() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": EMOJI}}}
    checked = check("json", json.dumps(schema), TOKENIZER)
    matcher = compile_grammar("json", checked["grammar"], TOKENIZER, [256])
    for text, fits in (("😀", True), ("1️⃣", True), ("12", False), ("a", False), ("", False)):
        written = json.dumps({"a": text}, ensure_ascii=False, separators=(",", ":")).encode()
        assert (matcher.deep_copy().try_consume_tokens(list(written)) == len(written)) == fits, text


@pytest.mark.parametrize(
    "pattern", [r"^(?!a)b", r"(?=a).b", r"^(?=a)a|b", r"^(?=a)(?<!b)c", r"^a(?=b)", r"^(?<=a)b", r"^(?=[)]a"]
)
def test_other_forms_are_refused(pattern: str) -> None:
    assert "look" in check("json", json.dumps({"type": "string", "pattern": pattern}), TOKENIZER)["fault"]


def test_what_has_none_stays() -> None:
    for schema in ({"pattern": r"^a(?:b)\(?=c"}, {"pattern": 3}, {"pattern": "(?=a)", "allOf": 3}, {}):
        assert without_look_ahead(schema) == schema
