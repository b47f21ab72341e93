"""The text of a `lark` grammar as the worker that compiles it takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def listed(frame: str, *others: Mapping[str, Any], **fields: Any) -> str:
    """The text of a `lark` grammar: the frame in Lark, and grammars that it names, each with one of `json_schema`,
    `regex` and `text_grammar`. `fields` come before them."""
    grammars = [{"name": "frame", "lark_grammar": frame}, *others]
    return json.dumps({**fields, "grammars": grammars}, ensure_ascii=False)
