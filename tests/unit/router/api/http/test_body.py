"""Bodies: content type, size, JSON syntax."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router, is_invalid, message_of
from starlette.requests import Request

from router.api.http import body as body_module
from router.api.http.body import LARGE_BODY
from router.config import RouterConfig

MakeRouter = Callable[..., Router]

HUGE = "9" * 5000


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b'{"inputs":"x"', 400),
        (b"{'inputs':'x'}", 400),
        (b'{"inputs":"x",}', 400),
        (b'{"inputs":"a\nb"}', 400),
        (b'{"inputs":"\xff\xfe"}', 400),
        (b'{"inputs":"\\ud800"}', 400),
        (b'{"inputs":"\\udc00\\ud800"}', 400),
        (b'{"inputs":"a\\udc80"}', 400),
        (b'{"inputs":"\\uDfFf","parameters":{"stop":["\\udc80"]}}', 400),
        # Its escaped quotes must not each be the beginning of another search to the end.
        (b"[" + b"[]," * 130 + b'"' + b'\\"' * 500_000, 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 100_000, 400),
        (b'{"inputs":' + b"[" * 130 + b"]" * 130 + b"}", 400),
        (b'{"inputs":"x","parameters":{"grammar":' + b'{"a":' * 200 + b"1" + b"}" * 202, 400),
        (b"null", 422),
        (b"[]", 422),
        (b'"x"', 422),
        (b"{}", 422),
        (b'{"inputs":null}', 422),
        (b'{"inputs":["x"]}', 422),
        (b'{"inputs":1}', 422),
        (b'{"inputs":"x","parameters":[]}', 422),
        (b'{"inputs":"x","inputs":"y"}', 422),
        (b'{"inputs":"x","parameters":{"seed":1,"seed":2}}', 422),
        (b'{"inputs":"x","unknown":' + HUGE.encode() + b"}", 422),
    ],
)
async def test_broken_bodies(router: Router, raw: bytes, status: int) -> None:
    for path in ("/generate", "/generate_stream", "/", "/tokenize"):
        body = await router.refused(path, raw, status)
        assert body["error_type"] == {400: "bad_request", 422: "validation"}[status]
    await router.refused("/v1/chat/completions", raw, 400, 422)
    await router.refused("/v1/completions", raw, 400, 422)


@pytest.mark.parametrize(
    "raw", [b'{"inputs":"a\\u0000b"}', b'\xef\xbb\xbf{"inputs":"x"}', b'{"inputs":"\\ud83d\\ude00"}']
)
async def test_odd_but_valid_bodies_are_served(router: Router, raw: bytes) -> None:
    assert (await router.post("/generate", raw=raw)).status_code == 200


async def test_a_megabyte_without_a_space(router: Router) -> None:
    answer = await router.post("/generate", {"inputs": "x" * 1_000_000})
    assert is_invalid(answer) and "or more `inputs` tokens" in message_of(answer)
    answer = await router.post("/generate", {"inputs": "x" * 1_000_000, "parameters": {"truncate": 7}})
    assert answer.status_code == 200 and router.scheduler.last.input_length == 7


async def test_more_objects_than_the_collector_can_go_through_quickly(router: Router) -> None:
    body = await router.refused("/generate", b'{"inputs":"x","a":[' + b"[]," * 200_000 + b"1]}", 422)
    assert "more than 200000 objects and arrays" in body["error"]
    in_a_text = {"inputs": "[" * 250_000, "parameters": {"truncate": 7}}
    assert (await router.post("/generate", in_a_text)).status_code == 200


async def test_large_bodies_are_parsed_one_at_a_time_and_beside_the_others(
    router: Router, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    checked = body_module._checked

    def watched(raw: bytes, *others: Any) -> Any:
        parsed.append(threading.current_thread().name)
        return checked(raw, *others)

    monkeypatch.setattr(body_module, "_checked", watched)
    large = {"inputs": "x " * LARGE_BODY, "parameters": {"truncate": 7}}
    answers = await asyncio.gather(*(router.post("/generate", body) for body in (large, large, {"inputs": "x"}, large)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len(parsed) == 4 and parsed.count(threading.current_thread().name) == 1 and len(set(parsed)) == 2


async def test_what_is_refused_is_not_kept(router: Router) -> None:
    """Neither by what pydantic raises, which the garbage collector cannot look into."""
    for _ in range(20):
        await router.refused("/invocations", b'{"prompt":[]}', 422)
        await router.refused("/generate", b'{"inputs":"x","parameters":{"stop":1}}', 422)
    gc.collect()
    assert sum(type(one) is Request for one in gc.get_objects()) < 10


async def test_content_types(router: Router) -> None:
    raw = b'{"inputs":"x"}'
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "", "application/jsonp"):
        answer = await router.request("POST", "/generate", content=raw, headers={"content-type": content_type})
        assert answer.status_code == 415 and answer.json()["error_type"] == "unsupported_media_type"
    for content_type in (
        "application/json",
        "application/json; charset=utf-8",
        "application/vnd.api+json",
        "Application/JSON",
    ):
        answer = await router.request("POST", "/generate", content=raw, headers={"content-type": content_type})
        assert answer.status_code == 200


async def test_bodies_over_the_limit_with_and_without_a_length(make_router: MakeRouter) -> None:
    router = make_router(config=RouterConfig(payload_limit=1000))

    async def chunks() -> Any:
        for _ in range(20):
            yield b" " * 100

    headers = {"content-type": "application/json"}
    for content in (b" " * 1001, chunks()):
        answer = await router.request("POST", "/generate", content=content, headers=headers)
        assert answer.status_code == 413 and answer.json()["error_type"] == "payload_too_large"
    fits = b'{"inputs":"x"}'
    answer = await router.request("POST", "/generate", content=fits + b" " * (1000 - len(fits)), headers=headers)
    assert answer.status_code == 200
