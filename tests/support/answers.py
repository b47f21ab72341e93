"""What end-to-end tests check of every HTTP answer before they look at its content."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(answer: httpx.Response, status: int, error_type: str, words: str = "") -> str:
    """The message, in the form of the API that the route belongs to."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error", "error_type"] and body["error_type"] == error_type, body
    is_openai = answer.request.url.path.startswith("/v1/")
    message = body["error"]["message"] if is_openai else body["error"]
    assert words in message, body
    return str(message)


def events_of(client: httpx.Client, path: str, body: dict[str, Any]) -> tuple[list[Any], str]:
    """The events of a stream, checked for their framing, and the last line."""
    with client.stream("POST", path, json=body) as answer:
        raw = answer.read().decode()
        assert answer.status_code == 200, raw
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["cache-control"] == "no-cache" and answer.headers["x-accel-buffering"] == "no"
        assert {"x-compute-type", "x-compute-characters", "x-request-id"} <= answer.headers.keys()
        assert not {"x-compute-time", "x-total-time", "x-generated-tokens"} & answer.headers.keys()
    assert raw.endswith("\n\n")
    lines = raw.removesuffix("\n\n").split("\n\n")
    assert all(re.match(r"data: \S", line) and "\n" not in line for line in lines)
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"], lines[-1]
