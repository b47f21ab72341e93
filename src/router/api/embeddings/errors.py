"""Errors in TEI's form on its routes, else OpenAI's."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from router.api.errors import BodyError, UnauthorizedError, openai_error, status_of
from router.api.json_out import JsonResponse
from router.errors import OverloadedError, RouterError, UnhealthyError
from router.pooling.errors import PoolingError
from wire.text.escape import shown

_OPENAI = ("/v1/", "/v2/", "/score", "/classify")
_STATUS = {"Validation": 422, "Empty": 400, "Overloaded": 429, "Backend": 424, "Tokenizer": 422, "Unhealthy": 503}
# What a status means in TEI's words, for errors that TEI has no word for.
_KINDS = {400: "Validation", 413: "Validation", 415: "Validation", 422: "Validation", 429: "Overloaded"}


def is_openai(path: str) -> bool:
    """Whether errors of this route are OpenAI's object."""
    return path.startswith(_OPENAI)


def error_answer(error: RouterError, path: str) -> Response:
    """Answer a refusal in the form of `path`'s API."""
    if is_openai(path):
        response = JsonResponse(
            {"error": _object(error), "error_type": _kind(error)}, status_code=_openai_status(error)
        )
    else:
        body = {"error": shown(str(error)), "error_type": _kind(error)}
        response = JsonResponse(body, status_code=_status(error))
    retry_after_s = getattr(error, "retry_after_s", None)
    if isinstance(error, OverloadedError | PoolingError) and retry_after_s is not None:
        response.headers["retry-after"] = str(retry_after_s)
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = "Bearer"
    if isinstance(error, UnhealthyError):
        response.headers["connection"] = "close"
    return response


def framework_answer(status: int, detail: str, path: str, headers: dict[str, str] | None = None) -> Response:
    """Answer unknown paths and wrong methods."""
    error = BodyError(status, "not_found", detail)
    response = error_answer(error, path)
    for name, value in (headers or {}).items():
        response.headers[name] = value
    return response


def _status(error: RouterError) -> int:
    return _STATUS[error.kind] if isinstance(error, PoolingError) else status_of(error)


def _kind(error: RouterError) -> str:
    if isinstance(error, PoolingError):
        return error.kind
    if isinstance(error, UnhealthyError):
        return "Unhealthy"
    if isinstance(error, BodyError | OverloadedError):
        return _KINDS.get(_status(error), error.error_type)
    return error.error_type


def _openai_status(error: RouterError) -> int:
    """Return 400 for the request's faults, also another kind of model, 500 for failures."""
    if not isinstance(error, PoolingError):
        return status_of(error, "openai")
    if error.failure == "model_type":
        return 400
    status = _STATUS[error.kind]
    return {422: 400, 424: 500}.get(status, status)


def _object(error: RouterError) -> dict[str, Any]:
    if not isinstance(error, PoolingError):
        return openai_error(error)
    status = _openai_status(error)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    return {"message": shown(error.detail), "type": kind, "param": error.param, "code": error.code}
