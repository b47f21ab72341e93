"""What every request body shares: strict JSON types, `null` read as absent, unknown fields ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

_FLOAT32_MAX = 3.4028234663852886e38
_FLOAT32_TINY = 2.0**-149


def _within_float32(value: float) -> float:
    """Parameters travel as float32 on the wire: too large a number would arrive as infinity, too small a one as 0."""
    if not -_FLOAT32_MAX <= value <= _FLOAT32_MAX:
        raise ValueError("number out of the range of a 32 bit float")
    return value if abs(value) >= _FLOAT32_TINY else 0.0


Float32 = Annotated[float, AfterValidator(_within_float32)]
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
