"""What a tool's schema says of an argument's type."""

from __future__ import annotations

from typing import Any

from router.answers.formats.schema_types import exclude_each_other


def _model(kind: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}


def test_models_exclude_each_other_by_the_values_of_a_key() -> None:
    assert exclude_each_other([_model("a"), _model("b"), _model(1)], {})
    assert not exclude_each_other([_model(1), _model("b"), _model(1.0)], {})
    assert not exclude_each_other([_model("a"), {"type": "object"}], {})
    root = {"$defs": {"a": _model("a"), "b": _model("b")}}
    assert exclude_each_other([{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], root)


def test_values_that_are_nested_too_deeply_exclude_nothing() -> None:
    deep: Any = 1
    for _ in range(20_000):
        deep = {"a": deep}
    assert not exclude_each_other([_model(deep), _model("b")], {})
