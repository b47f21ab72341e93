"""What request bodies share: strict types, null as absent, unknown fields ignored, misspelt ones gathered."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from router.schemas.other_fields import HARMLESS, REFUSED, Family, Place, in_our_words, refuse_unserved, served_as
from router.schemas.unknown import UnknownNames

T = TypeVar("T")

Items = Annotated[list[T], Field(fail_fast=True)]
"""A list whose first wrong item ends its validation: an error for each of a million is a second without the event loop,
and a gigabyte."""
TextOrItems = Annotated[
    Annotated[str, Tag("text")] | Annotated[Items[T], Tag("items")],
    Discriminator(
        lambda value: {str: "text", list: "items"}.get(type(value)),
        custom_error_type="text_or_items_type",
        custom_error_message="Input should be a string or a list",
    ),
]
"""A text or a list; an error names what is wrong in the list."""
FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_TINY = 2.0**-149


def _within_float32(value: float) -> float:
    """Refuse what float32 on the wire makes infinite or 0."""
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
Int64 = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
"""Of either kind, with a sign or without."""
UInt64 = Annotated[int, Field(ge=0, le=2**64 - 1)]


class Body(BaseModel):
    """A JSON object from a client: `"20"` and `20.0` are no integers, `true` is no number.

    Validated with an `UnknownNames` as context, it hands that the names that are not its own.
    """

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, populate_by_name=True)

    known_names: ClassVar[frozenset[str]]
    """Of its fields, as clients may write them."""
    names_of_parameters: ClassVar[frozenset[str]] = frozenset()
    """Of the fields of its `parameters`, where it has them."""
    field_names: ClassVar[frozenset[str]]
    family: ClassVar[Family | None] = None
    """Of its routes, where fields of other servers are in a table."""
    place: ClassVar[Place | None] = None
    """Of an object inside a body, likewise."""
    harmless_names: ClassVar[frozenset[str]] = frozenset()
    """Of fields that change nothing here."""

    def __init_subclass__(cls, *, place: Place | None = None, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.place = place or cls.place

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        cls.field_names = cls.known_names = frozenset(field.alias or name for name, field in cls.model_fields.items())
        if cls.family is not None:
            cls.known_names = cls.known_names.union(served_as(cls.field_names))
        if (where := cls.family or cls.place) is not None:
            cls.known_names = cls.known_names.union(REFUSED[where])
            cls.harmless_names = HARMLESS[where] - cls.known_names

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        if None in data.values():
            data = {name: value for name, value in data.items() if value is not None}
        if not data.keys() <= cls.known_names and isinstance(info.context, UnknownNames):
            names = [name for name in data if name not in cls.known_names and name not in cls.harmless_names]
            info.context.found(names, cls.known_names, cls.names_of_parameters)
        if data.keys() <= cls.field_names:
            return data
        if (where := cls.family or cls.place) is not None:
            refuse_unserved(data, where, cls.field_names)
        if cls.family is None:
            return data
        renamed = info.context.renamed if isinstance(info.context, UnknownNames) else {}
        return in_our_words(data, cls.family, cls.field_names, renamed)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Document that optional fields may be null."""
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


def check_keys(data: dict[str, Any], place: Place, known: frozenset[str], context: Any) -> None:
    """Check an object that has no class of its own as a `Body` checks itself."""
    if isinstance(context, UnknownNames):
        decided = known.union(REFUSED[place])
        context.found([name for name in data if name not in decided | HARMLESS[place]], decided)
    refuse_unserved({name: value for name, value in data.items() if value is not None}, place, known)


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
