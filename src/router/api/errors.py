"""Every error's status and body: OpenAI's form on /v1, Anthropic's on /v1/messages, else TGI's
(docs/compatibility.md).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from starlette.responses import Response

from router.api.json_out import JsonResponse, dumps
from router.errors import (
    ContextLengthError,
    ForbiddenError,
    GenerationError,
    IncompleteError,
    OverloadedError,
    RateLimitError,
    Reason,
    RouterError,
    TemplateError,
    ToolError,
    UnavailableError,
    UnhealthyError,
    ValidationError,
)
from router.metrics import Metrics
from router.tracing import entered
from wire.text.escape import shown

logger = logging.getLogger(__name__)

Family = Literal["tgi", "openai", "anthropic"]
ErrorFormat = Literal["auto", "tgi"]
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


class BodyError(RouterError):
    """A refused route, content type, size, syntax or shape."""

    def __init__(
        self,
        status: int,
        error_type: str,
        message: str,
        *,
        reason: Reason = "invalid_value",
        param: str | None = None,
        code: str | None = None,
        prefix: str = "",
    ) -> None:
        """Take TGI's status, and its prefix of the message."""
        self.prefix = prefix
        super().__init__(message, reason=reason, param=param, code=code)
        self.status = status
        self.error_type = error_type


class UnauthorizedError(RouterError):
    """No key, or not the right one."""

    error_type = "unauthorized"
    reason: Reason | None = "unauthorized"

    def __init__(self) -> None:
        super().__init__("invalid or missing API key")


class InternalError(RouterError):
    """An unforeseen failure, logged only."""

    def __init__(self) -> None:
        super().__init__("internal error")


class NotServedError(RouterError):
    """No such route, model or response; the message says what to use."""

    error_type = "not_found"
    reason: Reason | None = "unknown_route"


@dataclass(frozen=True)
class _Row:
    """An error's answer; `failure` labels `tgi_request_failure`, if counted here."""

    tgi_status: int
    status: int
    failure: str = ""


_TABLE: dict[type[RouterError], _Row] = {
    ValidationError: _Row(422, 400, "validation"),
    TemplateError: _Row(422, 400, "template"),
    ToolError: _Row(422, 400, "template"),
    OverloadedError: _Row(429, 429, "overloaded"),
    GenerationError: _Row(424, 500),
    IncompleteError: _Row(500, 500),
    UnavailableError: _Row(503, 503),
    UnhealthyError: _Row(503, 503, "overloaded"),
    UnauthorizedError: _Row(401, 401),
    ForbiddenError: _Row(403, 403),
    NotServedError: _Row(404, 404),
    InternalError: _Row(500, 500),
}
_OPENAI_CODES: dict[Reason, str | None] = {
    "body_too_large": "request_too_large",
    "cache_too_small": "context_length_exceeded",
    "content_type": "unsupported_content_type",
    "disk_full": "insufficient_storage",
    "draining": None,
    "invalid_type": "invalid_type",
    "malformed_json": None,
    "missing_field": "missing_required_parameter",
    "overloaded": "overloaded",
    "prompt_too_long": "context_length_exceeded",
    "unauthorized": "invalid_api_key",
    "unknown_adapter": "model_not_found",
    "unknown_field": "unknown_parameter",
    "unknown_model": "model_not_found",
    "unknown_route": "unknown_url",
    "unsupported": "unsupported_parameter",
    "wrong_method": "method_not_supported",
}
"""Every other reason is `invalid_value`."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 415: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip
# Those of rerankers and classifiers too, which may be behind a router of several models; /v2/ alone is KServe's.
_OPENAI_ROUTES = ("/v1/", "/v2/rerank", "/score", "/classify")
_FIELD = re.compile(r"[a-z_]{1,40}")


def family_of(path: str, error_format: ErrorFormat = "auto") -> Family:
    """The API that a path belongs to."""
    if path.startswith(MESSAGES):
        return "anthropic"
    if path.startswith(RESPONSES) or (path.startswith(_OPENAI_ROUTES) and error_format == "auto"):
        return "openai"
    return "tgi"


def status_of(error: RouterError, family: Family = "tgi") -> int:
    if isinstance(error, BodyError):
        return 400 if error.status == 422 and family != "tgi" else error.status
    row = _row(error)
    return row.tgi_status if family == "tgi" else row.status


def error_body(message: str, error_type: str) -> dict[str, str]:
    """The form of TGI's routes."""
    return {"error": shown(message), "error_type": error_type}


def body_of(error: RouterError, family: Family, request_id: str = "") -> dict[str, Any]:
    """Return an error's JSON."""
    if family == "tgi":
        return error_body(str(error), error.error_type)
    if family == "openai":
        return {"error": openai_error(error), "error_type": error.error_type}
    kind = _ANTHROPIC_TYPES.get(status_of(error, family), "api_error")
    text = shown(_message(error, family))
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": request_id}


def openai_error(error: RouterError) -> dict[str, Any]:
    """OpenAI's object `error`."""
    status = status_of(error, "openai")
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    if isinstance(error, RateLimitError):
        kind = error.kind
    usual = None if error.reason is None else _OPENAI_CODES.get(error.reason, "invalid_value")
    code = error.code or usual
    return {"message": shown(_message(error, "openai")), "type": kind, "param": error.param, "code": code}


def event_of(error: RouterError, family: Family) -> bytes:
    """Return the error event of chat or completion streams."""
    if family == "openai":
        return dumps(body_of(error, family))
    status = status_of(error)
    nested = {"message": shown(str(error)), "http_status_code": status, "type": error.error_type, "code": status}
    return dumps({"error": nested, "error_type": error.error_type})


def tgi_event_of(error: RouterError) -> bytes:
    """Return the error event of TGI's streams."""
    is_incomplete = isinstance(error, IncompleteError)
    message, kind = ("Incomplete generation stream", "incomplete_generation_stream") if is_incomplete else (
        str(error), error.error_type
    )  # fmt: skip
    return dumps(error_body(message, kind))


class ErrorAnswers:
    """Answers errors, and counts and logs refusals."""

    def __init__(self, error_format: ErrorFormat, metrics: Metrics) -> None:
        self._format = error_format
        self._metrics = metrics

    def family(self, path: str) -> Family:
        return family_of(path, self._format)

    def answer(
        self, error: RouterError, scope: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> Response:
        """Answer a request with nothing answered yet."""
        if renamed := scope.get(RENAMED):
            error.name_fields(renamed)
        if scope["method"] == "POST":
            self._count(error, is_request=scope.get(COUNTED, False))
        family, request_id = self.family(scope["path"]), scope.get("request_id", "")
        status = status_of(error, family)
        response = JsonResponse(body_of(error, family, request_id), status_code=status, headers=headers)
        if isinstance(error, OverloadedError | UnavailableError) and error.retry_after_s is not None:
            response.headers["retry-after"] = str(error.retry_after_s)
        if isinstance(error, UnauthorizedError):
            response.headers["www-authenticate"] = "Bearer"
        if isinstance(error, UnhealthyError):
            response.headers["connection"] = "close"
        return response

    def of_stream(self, error: Exception, request_id: str) -> RouterError:
        """Return a failed stream's error; unforeseen ones are logged."""
        if isinstance(error, RouterError):
            self._count(error, is_request=True)
            return error
        logger.error("a stream has failed", exc_info=error, extra={"request_id": request_id})
        return InternalError()

    def _count(self, error: RouterError, *, is_request: bool) -> None:
        """Count and log, without clients' texts."""
        if error.reason is None:  # a failure, which is counted and logged where it happens
            return
        self._metrics.count("tgi_request_refused", reason=error.reason)
        if is_request and (failure := _row(error).failure):
            self._metrics.count("tgi_request_failure", err=failure)
        if error.reason in ("unknown_route", "wrong_method"):  # what the line of the request says, too
            return
        asked, text = entered(), described(error)
        if asked is not None:
            asked.refused = text
        extra = {} if asked is None else asked.log_fields()
        logger.error("Refused: %s", text, extra=extra)
        logger.debug("%s", error, extra=extra)


COUNTED = "tercet.counted"
"""Member of a request's scope: it is one of `tgi_request_count`."""
RENAMED = "tercet.renamed"
"""Member of a request's scope: of fields of ours, the names that its body has for them."""


def described(error: RouterError) -> str:
    parts = [error.error_type, f"reason={error.reason}"]
    if error.param is not None and (field := _FIELD.match(error.param)) and error.reason != "unknown_field":
        parts.append(f"field={field[0]}")
    if error.given is not None:
        parts.append(f"given={error.given:g}" if isinstance(error.given, float) else f"given={error.given}")
    if error.limit is not None:
        parts.append(f"limit={error.limit:g}" if isinstance(error.limit, float) else f"limit={error.limit}")
    return " ".join(parts)


def _row(error: RouterError) -> _Row:
    if isinstance(error, BodyError):
        return _Row(error.status, error.status, "validation")
    return next((_TABLE[kind] for kind in type(error).__mro__ if kind in _TABLE), _TABLE[InternalError])


def _message(error: RouterError, family: Family) -> str:
    """Word it for OpenAI's and Anthropic's routes: agents recognize long prompts by these words."""
    if not isinstance(error, ContextLengthError):
        text = error.detail if isinstance(error, ValidationError | ToolError | BodyError) else str(error)
        # Anthropic's form has no other place for the field.
        if family != "anthropic" or error.param is None or error.param in text:
            return text
        # A fault that names the object around the field needs no other place.
        return text if error.param.startswith(f"{text.partition(': ')[0]}.") else f"{error.param}: {text}"
    tokens, limit = error.num_tokens, error.num_limit
    if family == "anthropic":
        if error.asked is None:
            return f"prompt is too long: {tokens} tokens > {limit} maximum"
        return (
            f"input length and `{error.asked_in}` exceed context limit: {tokens} + {error.asked} > {limit}, "
            f"decrease input length or `{error.asked_in}` and try again"
        )
    has = f"`{error.param}` has {tokens}{' or more' if error.or_more else ''} tokens"
    asks = "" if error.asked is None else f" and `{error.asked_in}` asks for {error.asked}"
    # The code in the text too: LangChain looks there, and openai's newer libraries show the text alone.
    return f"{has}{asks}: the maximum context length is {limit} tokens (context_length_exceeded)"
