"""Answers to unknown paths, wrong methods and faults of the server's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from router_fakes import Router, data_of

MakeRouter = Callable[..., Router]


async def test_unknown_paths_and_wrong_methods_answer_json(router: Router) -> None:
    for method, path, status in (
        ("GET", "/nothing", 404), ("POST", "/v1", 404), ("GET", "/generate", 405),
        ("DELETE", "/info", 405), ("PUT", "/v1/chat/completions", 405), ("POST", "/health", 405),
        ("POST", "/generate/", 404),
    ):  # fmt: skip
        answer = await router.request(method, path)
        assert answer.status_code == status, (method, path)
        assert list(answer.json()) == ["error", "error_type"]


async def test_an_error_nobody_foresaw_says_nothing(make_router: MakeRouter) -> None:
    def script(request: Any) -> Any:
        raise ZeroDivisionError("secret")

    router = make_router(script)
    answer = await router.post("/generate", {"inputs": "Hi"})
    assert answer.status_code == 500
    assert answer.json() == {"error": "internal error", "error_type": "internal"}
    router.assert_idle()


async def test_nor_inside_of_a_stream(make_router: MakeRouter) -> None:
    router = make_router(lambda request: [])  # the fake runs out of events with an IndexError
    answer = await router.post("/generate_stream", {"inputs": "Hi"})
    assert data_of(answer.content) == [{"error": "internal error", "error_type": "internal"}]
    answer = await router.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True})
    nested = {"message": "internal error", "http_status_code": 500, "type": "internal", "code": 500}
    assert data_of(answer.content) == [{"error": nested, "error_type": "internal"}, "[DONE]"]
    router.assert_idle()
