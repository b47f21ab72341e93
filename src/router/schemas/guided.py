"""Output constraints of OpenAI's routes, vLLM and SGLang."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from router.errors import FieldError
from router.grammar.checker import AskedGrammar
from router.schemas.base import Body, Items
from router.schemas.grammar import Grammar

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def one_of(texts: list[str], field: str = "grammar") -> AskedGrammar:
    """One of these texts, as it is."""
    options = "|".join(f"(?:{_META.sub(lambda found: chr(92) + found[0], text)})" for text in texts)
    return AskedGrammar("regex", options, field=field)


class StructuredOutputs(Body):
    """One constraint."""

    json_: dict[str, Any] | str | None = Field(
        default=None, alias="json", description="A JSON schema.", examples=[{"type": "object"}]
    )
    regex: str | None = Field(default=None, description="A regular expression.", examples=["[0-9]{3}"])
    choice: Items[str] | None = Field(default=None, description="One of these texts.", examples=[["yes", "no"]])
    json_object: bool | None = Field(default=None, description="`true`: any JSON object.", examples=[True])
    grammar: str | None = Field(
        default=None, description="A context-free grammar, in Lark or EBNF.", examples=['root ::= "yes" | "no"']
    )

    @model_validator(mode="before")
    @classmethod
    def _nothing_unserved(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in ("structural_tag", "whitespace_pattern"):
                if data.get(name):
                    text = f"`{name}` is not served here: use `json`, `regex`, `choice` or `grammar`"
                    raise FieldError(text, param=name, reason="unsupported")
            if data and cls.known_names.isdisjoint(data):
                raise FieldError("nothing in it constrains the answer", reason="missing_field")
        return data

    @property
    def asked(self) -> list[AskedGrammar]:
        """All that are given."""
        named = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        asked = [guided(kind, value, _OF_VLLM) for kind, value in named.items() if value is not None]
        return asked + [AskedGrammar("json_object", field=_OF_VLLM)] * bool(self.json_object)


_OF_VLLM = "structured_outputs"
_GUIDED = {
    "guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar",
    "regex": "regex", "ebnf": "grammar",
}  # fmt: skip
"""Fields of one constraint, and its kind."""


def guided(kind: str, value: Any, field: str) -> AskedGrammar:
    """Return the constraint of that kind."""
    if kind == "choice":
        if not value:
            raise FieldError(f"`{field}`: a choice needs at least one text", param=field)
        return one_of(value, field)
    return AskedGrammar("json" if kind == "json" else "regex" if kind == "regex" else "grammar", value, field=field)


class Constrained(Body):
    """Fields of OpenAI's routes that say what the answer must be, in the words of several servers."""

    response_format: Grammar | None = Field(
        default=None,
        description="Constrains the answer to JSON, a regular expression or a grammar. In a chat with `tools`: to "
        "JSON, if the model has a format of its own for calls.",
        examples=[
            {"type": "json_object"},
            {"type": "text"},
            {"type": "json_schema", "json_schema": {"name": "one", "schema": {"type": "object", "properties": {}}}},
        ],
    )
    guided_json: dict[str, Any] | str | None = Field(
        default=None, description="A JSON schema, as `response_format` has it.", examples=[{"type": "object"}]
    )
    guided_regex: str | None = Field(
        default=None, description="A regular expression that the answer matches.", examples=["[0-9]{3}"]
    )
    guided_choice: Items[str] | None = Field(
        default=None, description="The answer is one of these texts.", examples=[["yes", "no"]]
    )
    guided_grammar: str | None = Field(
        default=None,
        description="A context-free grammar of the answer, in Lark or EBNF.",
        examples=['root ::= "yes" | "no"'],
    )
    structured_outputs: StructuredOutputs | None = Field(
        default=None, description="vLLM's name for one such constraint.", examples=[{"choice": ["yes", "no"]}]
    )
    regex: str | None = Field(default=None, description="SGLang's name for `guided_regex`.", examples=["[0-9]{3}"])
    ebnf: str | None = Field(
        default=None, description="SGLang's name for `guided_grammar`.", examples=['root ::= "yes" | "no"']
    )

    @property
    def constraint(self) -> AskedGrammar | None:
        """Return the answer's constraint, in whichever field."""
        return next(iter(self._constraints()), None)

    def _constraints(self) -> list[AskedGrammar]:
        given = {field: getattr(self, field) for field in _GUIDED}
        asked = [guided(_GUIDED[field], value, field) for field, value in given.items() if value is not None]
        if self.structured_outputs is not None:
            asked += self.structured_outputs.asked
        if self.response_format is not None and self.response_format.type != "text":
            asked.append(replace(self.response_format.asked, field="response_format"))
        return asked

    @model_validator(mode="after")
    def _has_one_constraint(self) -> Constrained:
        if len(self._constraints()) > 1:
            raise FieldError(
                "more than one of `response_format`, `guided_…`, `structured_outputs` constrains the answer",
                reason="conflict",
            )
        return self
