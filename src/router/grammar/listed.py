"""The text of a `lark` grammar as the worker that compiles it takes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def listed(frame: str, *others: Mapping[str, Any], **fields: Any) -> str:
    """Return a `lark` grammar's text: the frame, and named `json_schema`, `regex` and `text_grammar`s, after
    `fields`.
    """
    grammars = [{"name": "frame", "lark_grammar": frame}, *others]
    return json.dumps({**fields, "grammars": grammars}, ensure_ascii=False)
