"""Constraints on the output in the words of vLLM: `structured_outputs`, and `guided_…` of its older versions."""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field, model_validator

from router.grammar.checker import AskedGrammar
from router.schemas.base import Body, Items

_META = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")


def one_of(texts: list[str]) -> AskedGrammar:
    """One of these texts, as it is."""
    return AskedGrammar("regex", "|".join(f"(?:{_META.sub(lambda found: chr(92) + found[0], text)})" for text in texts))


class StructuredOutputs(Body):
    """One constraint."""

    json_: dict[str, Any] | str | None = Field(
        default=None, alias="json", description="A JSON schema.", examples=[{"type": "object"}]
    )
    regex: str | None = Field(default=None, description="A regular expression.", examples=["[0-9]{3}"])
    choice: Items[str] | None = Field(default=None, description="One of these texts.", examples=[["yes", "no"]])
    json_object: bool | None = Field(default=None, description="`true`: any JSON object.", examples=[True])

    @model_validator(mode="before")
    @classmethod
    def _nothing_unserved(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in ("grammar", "structural_tag", "whitespace_pattern"):
                if data.get(name):
                    raise ValueError(f"`{name}` is not served here: use `json`, `regex` or `choice`")
        return data

    @property
    def asked(self) -> list[AskedGrammar]:
        """All that are given."""
        return guided(self.json_, self.regex, self.choice) + [AskedGrammar("json_object")] * bool(self.json_object)


def guided(schema: Any, regex: str | None, choice: list[str] | None) -> list[AskedGrammar]:
    """Those of the three that are given."""
    asked = [] if schema is None else [AskedGrammar("json", schema)]
    asked += [] if regex is None else [AskedGrammar("regex", regex)]
    if choice == []:
        raise ValueError("a choice needs at least one text")
    return asked + ([] if choice is None else [one_of(choice)])
