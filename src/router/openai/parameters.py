"""The parameters that chats and completions share, from their body to generate requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from router.errors import ValidationError
from router.generation.asked import GenerateRequest
from router.schemas.openai import OpenAIBody


def request_of(body: OpenAIBody, **others: Any) -> GenerateRequest:
    """Temperature 0 is greedy, everything else samples, as in TGI. `others`: fields that a chat and a completion have
    each in their own way, the prompt among them. Raises ValidationError."""
    greedy = body.temperature == 0
    sampling = {
        "temperature": None if greedy else body.temperature,
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


def choices_of(request: GenerateRequest, number: int) -> list[GenerateRequest]:
    """The requests of `n` choices; a seed is counted on, or all choices would be the same."""
    if "seed" not in request.given:
        return [request] * number
    sampling = request.sampling
    return [
        replace(request, sampling=replace(sampling, seed=(sampling.seed + index) % 2**64)) for index in range(number)
    ]


def _stops_of(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def _logit_bias_of(bias: dict[str, float] | list[float] | None) -> tuple[tuple[int, float], ...]:
    """OpenAI's map of token ids to biases, as pairs. Raises ValidationError."""
    if not bias:
        return ()
    if isinstance(bias, list):
        raise ValidationError("`logit_bias` must be an object of token ids and biases")
    try:
        # Ten digits hold every token id; more would be a number to parse for its own sake.
        return tuple((int(token_id[:11]), value) for token_id, value in bias.items())
    except ValueError:
        raise ValidationError("`logit_bias` must be an object of token ids and biases") from None
