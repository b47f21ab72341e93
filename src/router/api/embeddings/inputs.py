"""Texts, token ids and pairs of texts, in each form in which bodies hold them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema

Texts = tuple[str | tuple[int, ...], ...]


class Inputs:
    """Texts or token ids. is_batch: they came as a list of them."""

    __slots__ = ("is_batch", "texts")

    def __init__(self, texts: Texts, *, is_batch: bool) -> None:
        self.texts = texts
        self.is_batch = is_batch


class Pairs:
    """Texts and pairs of texts. is_batch: as of `Inputs`."""

    __slots__ = ("is_batch", "pairs")

    def __init__(self, pairs: tuple[tuple[str, str | None], ...], *, is_batch: bool) -> None:
        self.pairs = pairs
        self.is_batch = is_batch


def _inputs(value: Any) -> Inputs:
    if isinstance(value, Inputs):
        return value
    if isinstance(value, str):
        return Inputs((value,), is_batch=False)
    if not isinstance(value, list):
        raise ValueError("Input should be a text, a list of token ids, or a list of texts or of lists of token ids")
    if value and all(type(one) is int for one in value):
        return Inputs((_ids(value),), is_batch=False)
    found: list[str | tuple[int, ...]] = []
    for place, one in enumerate(value):
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, list) and all(type(i) is int for i in one):
            found.append(_ids(one))
        else:
            raise ValueError(f"item {place} should be a text or a list of token ids")
    return Inputs(tuple(found), is_batch=True)


def _ids(value: list[int]) -> tuple[int, ...]:
    if value and not (min(value) >= 0 and max(value) < 2**32):
        raise ValueError("token ids should be between 0 and 4294967295")
    return tuple(value)


def _pairs(value: Any) -> Pairs:
    if isinstance(value, Pairs):
        return value
    if isinstance(value, str):
        return Pairs(((value, None),), is_batch=False)
    expected = "a text, a pair of texts [text, text], or a list of these as [[text], [text, text], ...]"
    if not isinstance(value, list) or not value:
        raise ValueError(f"Input should be {expected}")
    if isinstance(value[0], str):
        return Pairs((_pair(value, expected),), is_batch=False)
    return Pairs(tuple(_pair(one, expected) for one in value), is_batch=True)


def _pair(value: Any, expected: str) -> tuple[str, str | None]:
    if not isinstance(value, list) or len(value) not in (1, 2) or not all(isinstance(one, str) for one in value):
        raise ValueError(f"Input should be {expected}")
    return value[0], value[1] if len(value) == 2 else None


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
InputField = Annotated[
    Any,
    BeforeValidator(_inputs),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                _IDS,
                {"type": "array", "items": {"anyOf": [{"type": "string"}, _IDS]}},
            ]
        }
    ),
]
_PAIR = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}
PairField = Annotated[
    Any,
    BeforeValidator(_pairs),
    WithJsonSchema({"anyOf": [{"type": "string"}, _PAIR, {"type": "array", "items": _PAIR}]}),
]
