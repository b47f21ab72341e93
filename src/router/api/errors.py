"""One table: exception → status and body. JSON answers are flat on every route; OpenAI streams nest the error."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import Response

from router.api.json_out import JsonResponse, dumps
from router.errors import (
    GenerationError,
    IncompleteError,
    OverloadedError,
    RouterError,
    TemplateError,
    ToolError,
    UnhealthyError,
    ValidationError,
)
from wire.text.escape import shown

logger = logging.getLogger(__name__)


class BodyError(RouterError):
    """A body that never becomes a request: content type, size, syntax, shape."""

    def __init__(self, status: int, error_type: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type


class UnauthorizedError(RouterError):
    """No key, or not the right one."""

    error_type = "unauthorized"

    def __init__(self) -> None:
        super().__init__("invalid or missing API key")


class InternalError(RouterError):
    """An unforeseen failure; its cause is in the log only."""

    def __init__(self) -> None:
        super().__init__("internal error")


class UnknownModelError(RouterError):
    """No model of that name is served."""

    error_type = "not_found"


class NotServedError(RouterError):
    """A route that other servers have; the message says what to use."""

    error_type = "not_found"


_STATUS: dict[type[RouterError], int] = {
    ValidationError: 422,
    TemplateError: 422,
    ToolError: 422,
    OverloadedError: 429,
    GenerationError: 424,
    IncompleteError: 500,
    UnhealthyError: 503,
    UnauthorizedError: 401,
    UnknownModelError: 404,
    NotServedError: 404,
}
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
"""How the paths begin whose errors have the form of another API."""
_MESSAGES_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    405: "invalid_request_error", 415: "invalid_request_error", 429: "rate_limit_error",
}  # fmt: skip
# Statuses that the framework finds by itself.
_HTTP_TYPES = {400: "bad_request", 404: "not_found", 405: "method_not_allowed"}


def status_of(error: RouterError) -> int:
    if isinstance(error, BodyError):
        return error.status
    return next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)


def error_body(message: str, error_type: str) -> dict[str, str]:
    return {"error": shown(message), "error_type": error_type}


def error_response(error: RouterError, path: str = "", request_id: str = "") -> Response:
    """The refusal of a request, in the form of the API that `path` belongs to."""
    if path.startswith(MESSAGES):
        response = JsonResponse(messages_error(error, request_id), status_code=_status_there(error))
    elif path.startswith(RESPONSES):
        response = JsonResponse({"error": responses_error(error)}, status_code=_status_there(error))
    else:
        response = JsonResponse(error_body(str(error), error.error_type), status_code=status_of(error))
    if isinstance(error, OverloadedError):
        response.headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, UnhealthyError):
        response.headers["connection"] = "close"
    return response


def framework_response(
    status: int, detail: str, headers: dict[str, str] | None = None, path: str = "", request_id: str = ""
) -> Response:
    """An answer for what the framework refuses: an unknown path, a wrong method."""
    error_type = _HTTP_TYPES.get(status, "http_error")
    error = BodyError(status, error_type, detail)
    if path.startswith(MESSAGES):
        return JsonResponse(messages_error(error, request_id), status_code=status, headers=headers)
    if path.startswith(RESPONSES):
        return JsonResponse({"error": responses_error(error)}, status_code=status, headers=headers)
    return JsonResponse(error_body(detail, error_type), status_code=status, headers=headers)


def public_error(error: Exception, request_id: str) -> RouterError:
    """The error that a failed stream ends with; an unforeseen one is logged and becomes InternalError."""
    if isinstance(error, RouterError):
        return error
    logger.error("a stream has failed", exc_info=error, extra={"request_id": request_id})
    return InternalError()


def messages_error(error: RouterError, request_id: str) -> dict[str, Any]:
    """The error as Anthropic's API has it."""
    kind = _MESSAGES_TYPES.get(_status_there(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": shown(str(error))}, "request_id": request_id}


def responses_error(error: RouterError) -> dict[str, Any]:
    """The error as OpenAI's Responses API has it; its object `error`."""
    status = _status_there(error)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"message": shown(str(error)), "type": kind, "param": None, "code": error.error_type}


def _status_there(error: RouterError) -> int:
    """Statuses of the Messages and Responses APIs: a request that cannot be served is 400, a failure 500."""
    status = status_of(error)
    return {422: 400, 424: 500}.get(status, status)


def tgi_event_body(error: RouterError) -> bytes:
    """The error as an event of a stream of TGI's own routes."""
    is_incomplete = isinstance(error, IncompleteError)
    message, kind = ("Incomplete generation stream", "incomplete_generation_stream") if is_incomplete else (
        str(error), error.error_type
    )  # fmt: skip
    return dumps(error_body(message, kind))


def openai_event_body(error: RouterError) -> bytes:
    """The error as an event of an OpenAI stream: openai's clients read `error.message`, hub's read `error_type`."""
    status = status_of(error)
    nested: dict[str, Any] = {"message": shown(str(error)), "http_status_code": status, "type": error.error_type}
    return dumps({"error": nested | {"code": status}, "error_type": error.error_type})
