"""No permit, never enough permits, and a server that is stopping."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from router_fakes import LIMITS, Router, data_of, failing, is_invalid, message_of

from router.errors import OverloadedError

MakeRouter = Callable[..., Router]


async def test_overload(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_concurrent_requests=1))
    assert router.inference.permit_pool.acquire(1)
    router.scheduler.wait_s = 2.3
    chat_body = {"messages": [{"role": "user", "content": "x"}]}
    for path, body in (
        ("/generate", {"inputs": "x"}),
        ("/generate_stream", {"inputs": "x"}),
        ("/", {"inputs": "x"}),
        ("/v1/chat/completions", chat_body),
        ("/v1/chat/completions", chat_body | {"stream": True}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "stream": True}),
    ):
        answer = await router.post(path, body)
        assert answer.status_code == 429
        assert message_of(answer) == "Model is overloaded" and answer.json()["error_type"] == "overloaded"
        assert answer.headers["retry-after"] == "3"
    assert b'tgi_request_failure{err="overloaded"} 7' in router.metrics.render()
    router.inference.permit_pool.give_back(1)
    assert (await router.post("/generate", {"inputs": "x"})).status_code == 200


async def test_more_generations_than_there_are_permits_are_refused_for_good(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_concurrent_requests=2, max_best_of=3))
    messages = [{"role": "user", "content": "x"}]
    instances = [{"inputs": "x"}] * 3
    for path, body in (
        ("/generate", {"inputs": "x", "parameters": {"best_of": 3, "do_sample": True}}),
        ("/v1/chat/completions", {"messages": messages, "n": 3}),
        ("/v1/chat/completions", {"messages": messages, "n": 3, "stream": True}),
        ("/v1/completions", {"prompt": ["x"] * 3}),
        ("/v1/completions", {"prompt": "x", "n": 3, "stream": True}),
        ("/v1/completions", {"prompt": "x", "n": 1, "best_of": 3}),
        ("/vertex", {"instances": instances}),
    ):
        answer = await router.post(path, body)
        assert is_invalid(answer), (path, answer.text)
        assert re.search(
            "up to 2 generations( at once)?. Given: (3|1 prompts with 3|3 prompts with 1)|<= 2. Given: 3$",
            message_of(answer),
        )
    assert not re.search(rb'tgi_request_failure{err="overloaded"} [1-9]', router.metrics.render())
    assert (await router.post("/v1/completions", {"prompt": ["x"] * 2})).status_code == 200
    router.assert_idle()


async def test_a_draining_server_refuses_and_is_not_ready(router: Router) -> None:
    router.inference.is_draining = True
    answer = await router.post("/generate", {"inputs": "x"})
    assert answer.status_code == 503 and answer.headers["connection"] == "close"
    assert (await router.get("/health")).status_code == 503


async def test_a_request_whose_time_is_over_before_it_was_begun(make_router: MakeRouter) -> None:
    router = make_router(lambda request: failing(error=OverloadedError(7)))
    answer = await router.post("/generate", {"inputs": "x"})
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
    assert answer.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
    stream = await router.post("/generate_stream", {"inputs": "x"})
    assert stream.status_code == 200 and data_of(stream.content) == [answer.json()]
    router.assert_idle()
