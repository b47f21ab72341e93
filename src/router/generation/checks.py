"""TGI's checks of fields whatever the prompt, in its order."""

from __future__ import annotations

from router.errors import ValidationError
from router.generation.asked import GenerateRequest
from router.limits import ServingLimits

_MAX_LOGIT_BIASES = 1024
_MAX_STOP_TOKENS = 64
_MAX_BIAS = 100.0
_SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "typical_p")


def check_streamed(request: GenerateRequest) -> None:
    """Refuse what streams lack, before the permit."""
    if request.best_of is not None and request.best_of != 1:
        raise ValidationError(
            "`best_of` other than 1 is not supported with streaming", param="best_of", reason="conflict"
        )
    if request.decoder_input_details:
        raise ValidationError(
            "`decoder_input_details` is not supported with streaming",
            param="decoder_input_details",
            reason="conflict",
        )


def check_best_of(best_of: int, limits: ServingLimits) -> None:
    """Refuse too many generations, before the permits."""
    limit = limits.max_best_of
    if limit == 1 and best_of != 1:
        raise ValidationError(
            "`best_of` other than 1 is not supported on this server", param="best_of", given=best_of, limit=limit
        )
    if best_of > limit:
        raise ValidationError(
            f"`best_of` must be > 0 and <= {limit}. Given: {best_of}",
            param="best_of",
            code="integer_above_max_value",
            given=best_of,
            limit=limit,
        )


def check_parameters(request: GenerateRequest, limits: ServingLimits, *, max_stop_bytes: int) -> None:
    """Refuse the first value out of range, in TGI's order."""
    best_of, api = request.best_of or 1, request.api
    if best_of > 1 and not samples(request):
        raise ValidationError("`best_of` > 1 requires sampling", param="best_of", reason="conflict")
    for allowed in api.ranges:
        value = getattr(request.sampling, allowed.name)
        if allowed.name in request.given and not allowed.holds(value):
            raise allowed.fault(value)
    if request.max_new_tokens is not None and request.max_new_tokens <= 0:
        raise ValidationError(
            f"`{api.max_new_tokens}` {api.new_tokens_rule}",
            param=api.max_new_tokens,
            code="integer_below_min_value",
            given=request.max_new_tokens,
            limit=1,
        )
    _check_stop(request, limits, max_stop_bytes)
    if "seed" in request.given and best_of > 1:
        raise ValidationError("`seed` cannot be combined with `best_of` > 1", param="seed", reason="conflict")
    limit = limits.max_top_n_tokens if api.most_top_n_tokens is None else api.most_top_n_tokens
    if (given := request.top_n_tokens or 0) > limit:
        raise ValidationError(
            f"`{api.top_n_tokens}` must be >= 0 and <= {limit}. Given: {given}",
            param=api.top_n_tokens,
            code="integer_above_max_value",
            given=given,
            limit=limit,
        )


def _check_stop(request: GenerateRequest, limits: ServingLimits, max_stop_bytes: int) -> None:
    stop, api = request.stop, request.api
    limit = limits.max_stop_sequences if api.most_stops is None else api.most_stops
    if len(stop) > limit:
        raise ValidationError(
            f"`{api.stop}` supports up to {limit} stop sequences. Given: {len(stop)}",
            param=api.stop,
            code="array_above_max_length",
            given=len(stop),
            limit=limit,
        )
    num_bytes = sum(len(text.encode()) for text in stop)
    if num_bytes > max_stop_bytes:
        raise ValidationError(
            f"`{api.stop}` supports up to {max_stop_bytes} bytes in all. Given: {num_bytes}",
            param=api.stop,
            code="string_above_max_length",
            given=num_bytes,
            limit=max_stop_bytes,
        )


def check_logit_bias(biases: tuple[tuple[int, float], ...], vocab_size: int) -> None:
    """Raises ValidationError."""
    if len(biases) > _MAX_LOGIT_BIASES:
        raise ValidationError(
            f"`logit_bias` supports up to {_MAX_LOGIT_BIASES} tokens. Given: {len(biases)}",
            param="logit_bias",
            given=len(biases),
            limit=_MAX_LOGIT_BIASES,
        )
    for token_id, bias in biases:
        if not 0 <= token_id < vocab_size:
            raise ValidationError(
                f"`logit_bias` names token {token_id}, which is not in the vocabulary", param="logit_bias"
            )
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise ValidationError(
                f"`logit_bias` values must be in [-100, 100]. Given: {bias}", param="logit_bias", given=bias
            )


def check_stop_tokens(token_ids: tuple[int, ...], vocab_size: int) -> None:
    """Raises ValidationError."""
    if len(token_ids) > _MAX_STOP_TOKENS:
        raise ValidationError(
            f"`stop_token_ids` supports up to {_MAX_STOP_TOKENS} tokens. Given: {len(token_ids)}",
            param="stop_token_ids",
            code="array_above_max_length",
            given=len(token_ids),
            limit=_MAX_STOP_TOKENS,
        )
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise ValidationError(
                f"`stop_token_ids` names token {token_id}, which is not in the vocabulary", param="stop_token_ids"
            )


def samples(request: GenerateRequest) -> bool:
    """Whether a sampling option was given, as TGI: even a temperature of 1.0."""
    return request.sampling.do_sample or not request.given.isdisjoint(_SAMPLING_OPTIONS)
