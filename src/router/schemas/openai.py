"""What the bodies of the OpenAI routes share: their parameters, and the refusal of what is not served."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from router.schemas.base import Body
from router.schemas.parameters import (
    UNSERVED,
    Choices,
    CommonParameters,
    FrequencyPenalty,
    LogitBias,
    Model,
    OpenAIStop,
    OpenAITemperature,
    PresencePenalty,
    Stream,
)


class StreamOptions(Body):
    include_usage: bool = Field(
        default=False, description="End the stream with the numbers of tokens.", examples=[True]
    )


class OpenAIBody(CommonParameters):
    """A body of an OpenAI route. Fields that change nothing (`user`, `store` and the like) are ignored."""

    model: Model = None
    temperature: OpenAITemperature = None
    frequency_penalty: FrequencyPenalty = None
    presence_penalty: PresencePenalty = None
    logit_bias: LogitBias = None
    stop: OpenAIStop = None
    n: Choices = None
    stream: Stream = False
    stream_options: StreamOptions = Field(
        default=StreamOptions(),
        description="What a stream reports in addition to the text.",
        examples=[{"include_usage": True}],
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls.known_names = cls.known_names.union(UNSERVED)

    @model_validator(mode="before")
    @classmethod
    def _nothing_unserved(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data.keys() & UNSERVED.keys() - cls.model_fields.keys():
                neutral, remedy = UNSERVED[name]
                if data[name] is not None and not any(_is_same(data[name], value) for value in neutral):
                    raise ValueError(f"`{name}` is not served here: {remedy}")
        return data


def _is_same(value: object, neutral: object) -> bool:
    return type(value) is type(neutral) and value == neutral
