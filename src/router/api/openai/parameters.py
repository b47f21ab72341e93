"""Parameters that chats and completions share."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from router.errors import ValidationError
from router.generation.asked import GenerateRequest
from router.schemas.openai import OpenAIBody

BodyType = TypeVar("BodyType", bound=OpenAIBody)

_TOKEN_ID = re.compile("0|[1-9][0-9]{0,9}")
_LIKELIEST = 1e-6
"""A `top_p` that leaves the likeliest token alone, as 0 means."""


def request_of(body: OpenAIBody, **others: Any) -> GenerateRequest:
    """Return the request: temperature 0 is greedy, else it samples, as TGI; `others`: own fields."""
    greedy = body.temperature == 0
    sampling = {
        "temperature": None if greedy else body.temperature,
        "top_k": None if body.top_k in (-1, 0) else body.top_k,
        "top_p": _LIKELIEST if body.top_p == 0 else body.top_p,
        "seed": None if body.seed == -1 else None if body.seed is None else body.seed % 2**64,
        "do_sample": not greedy,
        "frequency_penalty": None,
        "absolute_frequency_penalty": body.frequency_penalty,
        "logit_bias": _logit_bias_of(body.logit_bias),
    }
    others |= {
        "stop": _stops_of(body.stop),
        "stop_token_ids": tuple(body.stop_token_ids),
        "prediction": "" if body.prediction is None else body.prediction.text,
    }
    return GenerateRequest.of(body, sampling, greedy=greedy, **others)


def with_defaults(body: BodyType, defaults: Mapping[str, float]) -> BodyType:
    """Fill in the server's sampling defaults."""
    open_fields = {name: value for name, value in defaults.items() if getattr(body, name) is None}
    return body.model_copy(update=open_fields) if open_fields else body


def most_tokens(asked: int | None) -> int | None:
    """Return tokens to generate; None or -1: all that fit."""
    return None if asked == -1 else asked


def choices_of(request: GenerateRequest, number: int) -> list[GenerateRequest]:
    """Return `n` requests, counting a seed up."""
    if "seed" not in request.given:
        return [request] * number
    sampling = request.sampling
    return [
        replace(request, sampling=replace(sampling, seed=(sampling.seed + index) % 2**64)) for index in range(number)
    ]


def _stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _logit_bias_of(bias: dict[str, float] | list[float] | None) -> tuple[tuple[int, float], ...]:
    """Return OpenAI's biases as pairs."""
    if not bias:
        return ()
    if isinstance(bias, list):  # TGI's form, which its server ignores: nothing is asked for by zeros
        if not any(bias):
            return ()
        raise ValidationError("`logit_bias` must be an object of token ids and biases", param="logit_bias")
    if not all(map(_TOKEN_ID.fullmatch, bias)):
        raise ValidationError("the names in `logit_bias` must be token ids, in digits", param="logit_bias")
    return tuple((int(token_id), value) for token_id, value in bias.items())
