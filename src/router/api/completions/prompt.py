"""From a completion body to requests, refusals first."""

from __future__ import annotations

from dataclasses import dataclass

from router.api.completions.schema import CompletionBody
from router.api.openai.parameters import choices_of, most_tokens, request_of
from router.errors import BatchSizeError, ValidationError
from router.generation.api_rules import COMPLETIONS
from router.generation.asked import GenerateRequest
from router.limits import ServingLimits


@dataclass(frozen=True, kw_only=True)
class Counts:
    """`best_of` generations a prompt, `n` answered."""

    prompts: int
    n: int
    best_of: int

    @property
    def generations(self) -> int:
        return self.prompts * self.best_of


def counts_of(body: CompletionBody, limits: ServingLimits) -> Counts:
    """Refuse too many generations."""
    most, prompts, limit = limits.max_client_batch_size, len(body.prompt), limits.max_choices
    if prompts > most:
        text = f"`prompt` supports up to {most} prompts. Given: {prompts}"
        raise BatchSizeError(text, param="prompt", code="array_above_max_length", given=prompts, limit=most)
    n = 1 if body.n is None else body.n
    if not 1 <= n <= limit:
        code = "integer_below_min_value" if n < 1 else "integer_above_max_value"
        raise ValidationError(f"`n` must be > 0 and <= {limit}. Given: {n}", param="n", code=code, given=n, limit=limit)
    best_of = n if body.best_of is None else body.best_of
    if best_of < n:
        text = f"`best_of` must be >= `n`. Given: {best_of} and {n}"
        raise ValidationError(text, param="best_of", code="integer_below_min_value", given=best_of, limit=n)
    counts = Counts(prompts=prompts, n=n, best_of=best_of)
    if counts.generations > limit:
        raise BatchSizeError(
            f"a request supports up to {limit} generations. Given: {prompts} prompts with {best_of} generations each",
            param="n" if body.best_of is None else "best_of",
            given=counts.generations,
            limit=limit,
        )
    return counts


def check_served(body: CompletionBody, counts: Counts, *, prompt_logprobs: bool) -> None:
    """Refuse what cannot be honoured, such as `prompt_logprobs`."""
    if body.suffix is not None and body.echo:
        raise ValidationError("`echo` and `suffix` exclude each other", param="echo", reason="conflict")
    if body.max_tokens == 0 and not body.echo:
        text = "`max_tokens` must be > 0, or -1 for as many as fit; 0 needs `echo`"
        raise ValidationError(text, param="max_tokens", code="integer_below_min_value", given=0, limit=1)
    if body.only_echoes and body.min_tokens:
        text = f"`min_tokens` must be <= `max_tokens`. Given: {body.min_tokens} and 0"
        raise ValidationError(text, param="min_tokens", given=body.min_tokens, limit=0)
    if counts.best_of > counts.n:
        if body.only_echoes:
            text = "`best_of` > `n` needs tokens to compare: `max_tokens` must not be 0"
            raise ValidationError(text, param="best_of", reason="conflict")
        if body.stream:
            text = "`best_of` > `n` is not supported with streaming"
            raise ValidationError(text, param="best_of", reason="conflict")
        if body.temperature == 0:
            raise ValidationError("`best_of` > `n` requires sampling", param="best_of", reason="conflict")
    if body.echo and body.logprobs is not None:
        if body.stream:
            text = "`echo` with `logprobs` is not supported with streaming"
            raise ValidationError(text, param="echo", reason="conflict")
        if not prompt_logprobs:
            text = "`echo` with `logprobs` needs a server started with `--enable-prefill-logprobs`"
            raise ValidationError(text, param="echo", reason="unsupported")


def requests_of(body: CompletionBody, counts: Counts) -> list[GenerateRequest]:
    """Return `best_of` requests a prompt, in order."""
    return [request for prompt in body.prompt for request in choices_of(_request_of(body, prompt), counts.best_of)]


def _request_of(body: CompletionBody, prompt: str | list[int]) -> GenerateRequest:
    return request_of(
        body,
        api=COMPLETIONS,
        inputs=prompt if isinstance(prompt, str) else "",
        input_ids=None if isinstance(prompt, str) else tuple(prompt),
        add_special_tokens=body.add_special_tokens,
        # A step samples from each prompt that it completes: the one token is left out of the answer.
        max_new_tokens=1 if body.only_echoes else most_tokens(body.max_tokens),
        decoder_input_details=body.echo and body.logprobs is not None,
        top_n_tokens=body.logprobs,
        grammar=body.constraint,
    )
