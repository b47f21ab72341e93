"""The last event of a stream whose model has ended."""

from __future__ import annotations

from router.api.errors import MESSAGES, RESPONSES, ErrorAnswers, body_of, event_of, openai_error, tgi_event_of
from router.api.http import sse
from router.api.json_out import dumps
from router.errors import RouterError


def error_event(error: RouterError, path: str, errors: ErrorAnswers, request_id: str) -> bytes:
    """Frame an error as the streams of a path's API have it."""
    family = errors.family(path)
    if path.startswith(RESPONSES):
        said = openai_error(error)
        return b"event: error\n" + sse.event(
            {"type": "error", "code": said["code"], "message": said["message"], "param": None}
        )
    if path.startswith(MESSAGES):
        return b"event: error\n" + sse.frame(dumps(body_of(error, family, request_id)))
    if path.startswith("/v1/"):
        return sse.frame(event_of(error, family))
    return sse.frame(tgi_event_of(error))
