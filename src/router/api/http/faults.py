"""A body's fault: the client's field, and what it must be."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pydantic
from pydantic_core import ErrorDetails

from router.errors import FieldError, Reason

_MAX_DIGITS = 20  # of 2**64
_LINE = re.compile(r"[\x00-\x1f\x7f]+")
# pydantic's types of errors, and OpenAI's codes.
_CODES = {
    "greater_than_equal": "below_min_value", "greater_than": "below_min_value", "less_than_equal": "above_max_value",
    "less_than": "above_max_value", "too_long": "array_above_max_length", "string_too_long": "string_above_max_length",
    "string_too_short": "string_below_min_length", "too_short": "array_below_min_length",
}  # fmt: skip
_OBJECTS = ("model_type", "dict_type", "model_attributes_type")
_OUT_OF_RANGE = object()


def first_fault(error: pydantic.ValidationError, value: Any, renamed: Mapping[str, str]) -> FieldError:
    """Return a body's first fault, without the value.

    Args:
        renamed: The client's names of fields of ours.
    """
    fault = error.errors(include_url=False, include_input=False)[0]
    if fault["loc"] and (name := renamed.get(str(fault["loc"][0]))) is not None:
        fault["loc"] = (name, *fault["loc"][1:])
    place = _place(fault, value)
    raised = fault.get("ctx", {}).get("error")
    if isinstance(raised, FieldError):
        return raised.below(place)
    message = _message(fault)
    text = f"{clean(place)}: {message}" if place else message
    return FieldError(text, param=clean(place) or None, reason=_reason(fault["type"]), code=_code(fault, value))


def _message(fault: ErrorDetails) -> str:
    """Return pydantic's words, but of classes and functions of ours, and of what Python calls an object."""
    if fault["type"] in _OBJECTS:
        return "Input should be a JSON object"
    context = fault.get("ctx", {})
    if fault["type"] == "union_tag_invalid":
        return f"`type` must be one of {context['expected_tags']}, not {clean(context['tag'])!r}"
    if fault["type"] == "union_tag_not_found":
        return "`type` is missing"
    return fault["msg"].removeprefix("Value error, ")


def _reason(kind: str) -> Reason:
    if kind == "missing":
        return "missing_field"
    return "invalid_type" if kind.endswith("_type") or kind == "int_from_float" else "invalid_value"


def _code(fault: ErrorDetails, value: Any) -> str | None:
    code = _CODES.get(fault["type"])
    if code is None or "_value" not in code:
        return code
    limit = next(iter(fault.get("ctx", {}).values()), 0)
    return f"{'integer' if isinstance(limit, int) else 'decimal'}_{code}"


def _place(fault: ErrorDetails, value: Any) -> str:
    """Return the field's path as in the body, `messages[0].content`."""
    place = ""
    is_missing = fault["type"] == "missing"  # or null: then the body has its name
    steps = list(fault["loc"][: -1 if is_missing else None])
    if (is_missing or isinstance(fault.get("ctx", {}).get("error"), FieldError)) and _is_tag(steps, value):
        del steps[-1]
    for step in steps:
        if isinstance(value, list) and isinstance(step, int) and step < len(value):
            place, value = f"{place}[{step}]", value[step]
        elif isinstance(value, dict) and step in value:
            place, value = f"{place}.{step}" if place else str(step), value[step]
    if is_missing:
        place = f"{place}.{fault['loc'][-1]}" if place else str(fault["loc"][-1])
    return place


def _is_tag(steps: list[int | str], value: Any) -> bool:
    """Whether the last step is the object's kind, as with `{"type": "text", "text": ""}`, and no object of its own."""
    for step in steps[:-1]:
        is_inside = (isinstance(value, list) and isinstance(step, int)) or (isinstance(value, dict) and step in value)
        value = value[step] if is_inside else value
    if not steps or not isinstance(value, dict) or value.get("type") != steps[-1]:
        return False
    return not isinstance(value.get(str(steps[-1])), dict)


def integer(digits: str) -> int | None:
    """Return a 64-bit number, if it is."""
    if len(digits) > _MAX_DIGITS:
        return None
    value = int(digits)
    return value if -(2**63) <= value < 2**64 else None


def number_out_of_range(text: str) -> str | None:
    """Return the path of the first number no field can hold."""

    def read(digits: str) -> object:
        return _OUT_OF_RANGE if integer(digits) is None else 0

    def read_float(number: str) -> object:
        return _OUT_OF_RANGE if float(number) in (float("inf"), float("-inf")) else 0

    decoder = json.JSONDecoder(parse_int=read, parse_float=read_float, parse_constant=lambda name: _OUT_OF_RANGE)
    return _path_to_number(decoder.decode(text.removeprefix("\ufeff")))


def _path_to_number(value: Any) -> str | None:
    steps: list[tuple[str, Any]] = [("", value)]
    while steps:
        place, value = steps.pop()
        if value is _OUT_OF_RANGE:
            return clean(place) or None
        if isinstance(value, dict):
            steps += [(f"{place}.{name}" if place else name, one) for name, one in reversed(value.items())]
        elif isinstance(value, list):
            steps += [(f"{place}[{number}]", one) for number, one in reversed(list(enumerate(value)))]
    return None


def clean(text: str) -> str:
    """For names that come from the client."""
    return _LINE.sub(" ", text)[:200]
