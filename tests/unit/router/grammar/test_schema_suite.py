"""JSON Schema's own test suite: what it calls invalid cannot be written, in any of its drafts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLTokenizer, TokenizerWrapper
from support.schema_suite import DRAFTS, cases

from router.grammar.worker import _Bytes, check
from wire.grammar import compile_grammar

# What is in a text is a remark, as the drafts since 2019-09 have it; formats are those of docs/compatibility.md.
REMARKS = ("optional/content.json", "optional/format/")


@pytest.mark.long
@pytest.mark.parametrize(("draft", "name"), [*DRAFTS.items(), *((draft, None) for draft in DRAFTS)])
def test_no_invalid_instance_can_be_written(draft: str, name: str | None) -> None:
    """`name`: what each schema says of its draft, if it says it; of what does not, all drafts' readings hold."""
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()))
    writable, num_refused, num_invalid, num_valid = list[Any](), 0, 0, 0
    for place, schema, instances in cases(draft):
        if not isinstance(schema, dict) or place.startswith(REMARKS):
            continue
        schema = {"$schema": name} | schema if name else schema
        checked = check("json", json.dumps(schema), tokenizer)
        if "fault" in checked:
            num_refused += 1
            continue
        matcher = compile_grammar("json", checked["grammar"], tokenizer, [256])
        for one in instances:
            walker = matcher.deep_copy()
            text = json.dumps(one["data"], ensure_ascii=False, separators=(",", ":")).encode()
            can_come = walker.try_consume_tokens(list(text)) == len(text) and walker.is_accepting()
            num_invalid += not one["valid"]
            num_valid += one["valid"] and can_come
            if can_come and not one["valid"]:
                writable.append((place, one["description"]))
    assert not writable
    assert num_invalid > 200 and num_valid > 250, (num_refused, num_invalid, num_valid)
