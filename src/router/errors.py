"""The router's exceptions: what is wrong, apart from how an API says it. `router.api.errors` words them.

RouterError
├── ValidationError       the request itself is at fault
│   ├── ContextLengthError    its prompt, or that and what is asked for, does not fit
│   ├── GrammarError          a grammar that cannot be compiled
│   ├── ImageError            an image that cannot be fetched or read
│   ├── BatchSizeError        more prompts, choices or instances than one request may hold
│   └── SuffixError           a completion with a `suffix`
├── TemplateError         the chat template could not be rendered
├── ToolError             tools or tool output that cannot be honoured
├── OverloadedError       no permit is free, or other requests keep what it needs
│   └── RateLimitError        a limit of its API key is reached
├── ForbiddenError        the API key may not do this
├── GenerationError       the shards failed
├── IncompleteError       the generation ended without a last token
├── UnavailableError      one of several models is not loaded
├── UnhealthyError        a shard does not answer, or the server is stopping
└── StartupError          (never reaches a client: ends the process with one line)
    ├── ArgumentValidation    options that contradict each other or the shards
    └── BackendError          the shards cannot be reached, or not warmed up
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from wire.text.escape import quoted

Reason = Literal[
    "body_too_large", "cache_too_small", "conflict", "content_type", "disk_full", "draining", "forbidden",
    "invalid_grammar", "invalid_image", "invalid_type", "invalid_value", "malformed_json", "missing_field",
    "overloaded", "model_unavailable", "prompt_empty", "prompt_too_long", "rate_limit", "template",
    "too_many_generations", "tools", "unauthorized", "unknown_adapter", "unknown_field", "unknown_model",
    "unknown_response", "unknown_route", "unsupported", "wrong_method",
]  # fmt: skip
"""Why a request is refused, in the log and in `tgi_request_refused`."""


class RouterError(Exception):
    """An error with a public message, `str(error)`."""

    # TGI's stable word.
    error_type = "internal"
    # Why it is refused; None: it failed.
    reason: Reason | None = None
    prefix = ""

    def __init__(
        self,
        detail: str,
        *,
        param: str | None = None,
        reason: Reason | None = None,
        code: str | None = None,
        given: float | None = None,
        limit: float | None = None,
    ) -> None:
        super().__init__(self.prefix + detail)
        # The message without TGI's prefix.
        self.detail = detail
        # The client's field at fault.
        self.param = param
        # OpenAI's word, if not the reason's usual one.
        self.code = code
        # The number at fault; `limit`: its bound.
        self.given = given
        self.limit = limit
        if reason is not None:
            self.reason = reason

    def name_fields(self, names: Mapping[str, str]) -> None:
        """Name fields as the client does.

        Args:
            names: The client's name of each of ours.
        """
        self.param = names.get(self.param or "", self.param)
        detail = self.detail
        for ours, theirs in names.items():
            detail = detail.replace(f"`{ours}`", f"`{theirs}`")
        self.say(detail)

    def say(self, detail: str) -> None:
        """Replace the message without TGI's prefix."""
        self.detail = detail
        self.args = (self.prefix + detail,)


class FieldError(ValueError):
    """What is wrong with a field, handed on by pydantic."""

    def __init__(
        self, text: str, *, param: str | None = None, reason: Reason = "invalid_value", code: str | None = None
    ) -> None:
        super().__init__(text)
        # The path from the object that raised it.
        self.param = param
        self.reason = reason
        # OpenAI's word, if not the usual one.
        self.code = code

    def below(self, place: str) -> FieldError:
        """Return the fault with its object at `place`; empty: the body."""
        if not place:
            return self
        param = place if self.param is None else f"{place}.{self.param}"
        return FieldError(f"{place}: {self}", param=param, reason=self.reason, code=self.code)


class ValidationError(RouterError):
    """The request itself is at fault."""

    error_type = "validation"
    reason: Reason | None = "invalid_value"
    prefix = "Input validation error: "


class ContextLengthError(ValidationError):
    """The prompt is too long, or leaves nothing for the asked tokens."""

    reason: Reason | None = "prompt_too_long"

    def __init__(
        self,
        detail: str,
        *,
        param: str,
        num_tokens: int,
        limit: int,
        asked: int | None = None,
        asked_in: str = "",
        or_more: bool = False,
    ) -> None:
        super().__init__(detail, param=param, given=num_tokens + (asked or 0), limit=limit)
        # Of the prompt.
        self.num_tokens = num_tokens
        self.num_limit = limit
        # To generate; None: the prompt alone does not fit.
        self.asked = asked
        # The client's field.
        self.asked_in = asked_in
        # `num_tokens` is only the least.
        self.or_more = or_more

    def name_fields(self, names: Mapping[str, str]) -> None:
        super().name_fields(names)
        self.asked_in = names.get(self.asked_in, self.asked_in)


class GrammarError(ValidationError):
    """A grammar that means nothing or cannot be compiled."""

    reason: Reason | None = "invalid_grammar"


class ImageError(ValidationError):
    """An image that cannot be fetched or read."""

    reason: Reason | None = "invalid_image"


class BatchSizeError(ValidationError):
    """More prompts, choices or instances than one request may hold."""

    error_type = "batch size exceeded"
    reason: Reason | None = "too_many_generations"


class SuffixError(ValidationError):
    """A completion with a `suffix`."""

    error_type = "suffix not supported"
    reason: Reason | None = "unsupported"


class TemplateError(RouterError):
    """The chat template could not be rendered, or there is none."""

    error_type = "template_error"
    reason: Reason | None = "template"
    prefix = "Template error: "


class ToolError(RouterError):
    """Tools or tool output that cannot be honoured."""

    error_type = "tool_error"
    reason: Reason | None = "tools"
    prefix = "Tool error: "


class OverloadedError(RouterError):
    """No permit is free; `retry_after_s` estimates the queue's drain."""

    error_type = "overloaded"
    reason: Reason | None = "overloaded"

    def __init__(self, retry_after_s: int = 1) -> None:
        super().__init__("Model is overloaded")
        self.retry_after_s = retry_after_s


class RateLimitError(OverloadedError):
    """A limit of the request's API key; TGI's clients know it as an overload."""

    reason: Reason | None = "rate_limit"

    def __init__(self, detail: str, *, kind: str, retry_after_s: int) -> None:
        RouterError.__init__(self, detail, code="rate_limit_exceeded")
        # What is limited, OpenAI's `type`.
        self.kind = kind
        self.retry_after_s = retry_after_s


class ForbiddenError(RouterError):
    """The API key is valid, but not for this."""

    error_type = "forbidden"
    reason: Reason | None = "forbidden"


class GenerationError(RouterError):
    """The shards failed while the request ran."""

    error_type = "generation"
    prefix = "Request failed during generation: "


class IncompleteError(RouterError):
    """The generation ended without a last token."""

    error_type = "incomplete_generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class UnavailableError(RouterError):
    """One of several models is not loaded now; `retry_after_s` says when it may be."""

    reason: Reason | None = "model_unavailable"

    def __init__(self, detail: str, error_type: str, retry_after_s: int | None = None) -> None:
        super().__init__(detail, param="model", code=error_type)
        self.error_type = error_type
        self.retry_after_s = retry_after_s


class UnhealthyError(RouterError):
    """A shard does not answer, or the scheduler stopped."""

    error_type = "healthcheck"
    reason: Reason | None = "draining"

    def __init__(self) -> None:
        super().__init__("unhealthy")


class StartupError(RouterError):
    """The router cannot start; the message names cause and flag."""

    error_type = "startup"
    variant = "WebServer"
    """TGI's name for the kind of failure, which log scrapers match."""

    def report(self, text: str) -> str:
        """Return TGI's last line on standard error."""
        return f"Error: {self.variant}({quoted(text)})"


class ArgumentValidation(StartupError):
    variant = "ArgumentValidation"


class BackendError(StartupError):
    variant = "Backend"
