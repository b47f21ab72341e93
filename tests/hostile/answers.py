"""What every answer must look like, whatever was asked: one end, a status that is meant, nothing of the inside."""

from __future__ import annotations

import json
from typing import Any

import httpx
from hostile.target import KEY

REFUSALS = frozenset({400, 413, 415, 422, 429})
"""Statuses of requests that are wrong or too many; 422 is of TGI's routes only."""
_INTERNALS = ("Traceback", "site-packages", ".py", "/proc/", "/tmp/", KEY)
_LONGEST_ERROR = 4096
_NAMED = ("/v1/messages", "/v1/responses")
"""Routes whose streams have named events."""
_ENDS = ("message_stop", "response.completed", "response.incomplete")
"""Of streams that do not fail."""


def check(answer: httpx.Response, refusals: frozenset[int] = REFUSALS) -> None:
    """Raises AssertionError."""
    if answer.status_code != 200:
        assert answer.status_code in refusals, f"{answer.status_code}: {answer.text[:500]}"
        check_error(answer.text, answer.request.url.path)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        check_stream(answer.text, answer.request.url.path)
    elif answer.headers["content-type"].startswith("application/json"):
        json.loads(answer.text)


def check_error(text: str, path: str = "") -> None:
    """Of a refusal: the shape of the API that `path` belongs to, TGI's by default, and no word about where or how we
    run."""
    body = json.loads(text)
    if path.startswith("/v1/messages"):
        assert set(body) == {"type", "error", "request_id"} and set(body["error"]) == {"type", "message"}, text[:500]
    else:
        assert set(body) == {"error", "error_type"}, text[:500]
        is_object = path.startswith("/v1/")
        assert (set(body["error"]) == {"message", "type", "param", "code"}) if is_object else (
            isinstance(body["error"], str)
        ), text[:500]  # fmt: skip
    assert len(text) < _LONGEST_ERROR, text[:500]
    assert not any(word in text for word in _INTERNALS), text[:500]


def check_stream(text: str, path: str = "") -> None:
    """Exactly one end, and nothing after it."""
    events = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
    assert events, text[:500]
    if path.startswith(_NAMED):
        ends = [json.loads(event)["type"] in _ENDS for event in events]
        assert ends == [False] * (len(ends) - 1) + [True], text[-500:]
    elif events[-1] == "[DONE]":
        _check_openai_events([json.loads(event) for event in events[:-1]])
    else:
        ends = [_is_end(json.loads(event)) for event in events]
        assert ends == [False] * (len(ends) - 1) + [True], text[-500:]


def _is_end(event: Any) -> bool:
    """Of TGI's own routes."""
    return "error" in event or event["generated_text"] is not None


def _check_openai_events(events: list[Any]) -> None:
    if any("error" in event for event in events):
        assert [index for index, event in enumerate(events) if "error" in event] == [len(events) - 1]
        return
    ended: set[int] = set()
    for event in events:
        for choice in event["choices"]:
            assert choice["index"] not in ended, events[-3:]
            if choice["finish_reason"] is not None:
                ended.add(choice["index"])
    seen = {choice["index"] for event in events for choice in event["choices"]}
    assert seen == ended, events[-3:]
