"""Constraints on the output: TGI's `grammar` and the `response_format` of the chat route."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from router.schemas.base import Body


class Grammar(Body):
    """TGI's form `{type, value}`; chat clients also send `json_schema` or `schema` in the place of `value`."""

    type: Literal["json", "json_object", "json_schema", "regex", "text"]
    value: Any = None
    json_schema: dict[str, Any] | None = None
    schema_: Any = Field(default=None, alias="schema")
