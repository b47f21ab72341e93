"""What every request body shares: strict JSON types, `null` read as absent, unknown fields ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_TINY = 2.0**-149


def _within_float32(value: float) -> float:
    """Parameters travel as float32 on the wire: too large a number would arrive as infinity, too small a one as 0."""
    if not -FLOAT32_MAX <= value <= FLOAT32_MAX:
        raise ValueError("number out of the range of a 32 bit float")
    return value if abs(value) >= _FLOAT32_TINY else 0.0


Float32 = Annotated[
    float,
    AfterValidator(_within_float32),
    WithJsonSchema({"type": "number", "minimum": -FLOAT32_MAX, "maximum": FLOAT32_MAX}),
]
UInt32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1)]


class Body(BaseModel):
    """A JSON object from a client: `"20"` and `20.0` are no integers, `true` is no number."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, populate_by_name=True)

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if isinstance(data, dict) and None in data.values():
            return {name: value for name, value in data.items() if value is not None}
        return data

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The document says of every field that may be left out that it may be null as well."""
        schema = handler(core_schema)
        fields = handler.resolve_ref_schema(schema)
        if required := fields.get("required"):  # what must be given comes first, also before inherited fields
            fields["properties"] = dict(
                sorted(fields["properties"].items(), key=lambda field: field[0] not in required)
            )
        for name, field in fields.get("properties", {}).items():
            if name not in fields.get("required", ()):
                fields["properties"][name] = _nullable(field)
        return schema


_OF_THE_FIELD = ("title", "description", "examples", "default")


def _nullable(field: JsonSchemaValue) -> JsonSchemaValue:
    kinds = field.get("anyOf")
    if kinds is not None and {"type": "null"} in kinds:
        return field
    if not set(field) - set(_OF_THE_FIELD) or field.get("type") == "null":
        return field  # any value
    outside = {name: value for name, value in field.items() if name in _OF_THE_FIELD}
    inside = {name: value for name, value in field.items() if name not in _OF_THE_FIELD}
    return {"anyOf": [*(inside["anyOf"] if set(inside) == {"anyOf"} else [inside]), {"type": "null"}]} | outside
