"""Constraints on the output: TGI's `grammar` and the `response_format` of the chat route."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from router.errors import FieldError
from router.grammar.checker import AskedGrammar
from router.schemas.base import Body, check_keys


class Grammar(Body, place="chat response_format"):
    """TGI's form `{type, value}`; chat clients also send `json_schema` or `schema` instead of `value`.

    `regex`: `value` is a regular expression. `json`, `json_object`: a JSON schema, as an object or as text;
    `json_object` without one means any object. `json_schema`: an object with `schema`. `lark`, `ebnf`, `gbnf`: `value`
    is a context-free grammar, in Lark or in the form of llama.cpp. `text`: no constraint.
    """

    type: Literal["json", "json_object", "json_schema", "regex", "lark", "ebnf", "gbnf", "text"] = Field(
        description="What the answer must be.", examples=["regex", "json_object"]
    )
    value: Any = Field(
        default=None,
        description="A regular expression, a grammar or a JSON schema, as `type` says.",
        examples=["[0-9]{3}"],
    )
    json_schema: dict[str, Any] | None = Field(
        default=None,
        description="OpenAI's form: an object with `schema`; for the type `json_schema`.",
        examples=[{"name": "person", "schema": {"type": "object", "properties": {"age": {"type": "integer"}}}}],
    )
    schema_: Any = Field(
        default=None,
        alias="schema",
        description="A JSON schema instead of `value`.",
        examples=[{"type": "object", "properties": {"age": {"type": "integer"}}}],
    )

    @field_validator("json_schema")
    @classmethod
    def _has_known_keys(cls, form: dict[str, Any] | None, info: ValidationInfo) -> Any:
        if form is not None:
            check_keys(form, "chat response_format", frozenset({"schema"}), info.context)
        return form

    @model_validator(mode="after")
    def _has_its_own_schema(self) -> Grammar:
        if self.json_schema is not None and self.type != "json_schema":
            text = f"`json_schema` belongs to the type `json_schema`, not to `{self.type}`"
            raise FieldError(text, param="json_schema", reason="conflict")
        return self

    @property
    def asked(self) -> AskedGrammar:
        """Return the constraint in validation's words."""
        given = (self.json_schema, self.value, self.schema_)
        value = next((one for one in given if one is not None), None)
        if self.type == "json_schema" and self.json_schema is None and self.value is None and value is not None:
            value = {"schema": value}
        if self.type == "lark" or self.type == "ebnf" or self.type == "gbnf":
            return AskedGrammar("grammar", value)
        return AskedGrammar(self.type, value)
