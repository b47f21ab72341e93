"""The server's defaults of sampling: on which routes they hold, and what wins over them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from router_fakes import Router

from router.api.completions.schema import CompletionBody
from router.api.openai.parameters import with_defaults
from router.request import SamplingParameters

MakeRouter = Callable[..., Router]

DEFAULTS = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
    "presence_penalty": 0.5, "frequency_penalty": -0.5,
}  # fmt: skip
ON_THE_WIRE = {"frequency_penalty": "absolute_frequency_penalty"}
HI = [{"role": "user", "content": "Hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HI}),
    ("/invocations", {"messages": HI}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/responses", {"input": "Hi"}),
    ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": HI}),
]
OF_TGI: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": "Hi"}),
    ("/", {"inputs": "Hi"}),
    ("/invocations", {"inputs": "Hi"}),
    ("/vertex", {"instances": [{"inputs": "Hi"}]}),
]


def of_last(router: Router, name: str) -> float:
    return float(getattr(router.scheduler.last.sampling, ON_THE_WIRE.get(name, name)))


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_they_hold_where_the_request_is_silent(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router(sampling_defaults=DEFAULTS)
    for stream in (False, True):
        answer = await router.post(path, body | {"stream": stream})
        assert answer.status_code == 200, answer.text
        assert {name: of_last(router, name) for name in DEFAULTS} == DEFAULTS
    answer = await router.post(path, body | {"temperature": 0.25, "top_p": None})
    assert answer.status_code == 200
    assert {name: of_last(router, name) for name in DEFAULTS} == DEFAULTS | {"temperature": 0.25}


@pytest.mark.parametrize(("path", "body"), OF_TGI)
async def test_tgi_s_own_routes_keep_tgi_s(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router(sampling_defaults=DEFAULTS)
    assert (await router.post(path, body)).status_code == 200
    plain = SamplingParameters()
    assert {name: of_last(router, name) for name in DEFAULTS} == {
        name: getattr(plain, ON_THE_WIRE.get(name, name)) for name in DEFAULTS
    }


@pytest.mark.parametrize(("path", "body"), ROUTES[:3])
async def test_a_request_can_switch_each_off(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router(sampling_defaults=DEFAULTS)
    off = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }  # fmt: skip
    assert (await router.post(path, body | off)).status_code == 200
    assert {name: of_last(router, name) for name in DEFAULTS} == off | {"top_k": 0}


async def test_greedy_requests_have_no_filters_and_keep_the_penalties(make_router: MakeRouter) -> None:
    router = make_router(sampling_defaults=DEFAULTS)
    path, body = ROUTES[0]
    assert (await router.post(path, body | {"temperature": 0})).status_code == 200
    sampling = router.scheduler.last.sampling
    assert not sampling.do_sample and (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
    assert (sampling.repetition_penalty, sampling.presence_penalty) == (1.05, 0.5)


async def test_a_model_may_be_greedy_by_default(make_router: MakeRouter) -> None:
    router = make_router(sampling_defaults={"temperature": 0.0, "top_k": 5})
    for path, body in ROUTES:
        assert (await router.post(path, body)).status_code == 200
        assert not router.scheduler.last.sampling.do_sample and router.scheduler.last.sampling.top_k == 0
    path, body = ROUTES[0]
    assert (await router.post(path, body | {"temperature": 0.5})).status_code == 200
    assert router.scheduler.last.sampling.do_sample and router.scheduler.last.sampling.top_k == 5


async def test_every_choice_has_them(make_router: MakeRouter) -> None:
    router = make_router(sampling_defaults=DEFAULTS)
    for path, body in (ROUTES[0], ROUTES[2]):
        assert (await router.post(path, body | {"n": 3})).status_code == 200
        assert [one.sampling.top_k for one in router.scheduler.submitted[-3:]] == [20, 20, 20]


async def test_info_says_them(make_router: MakeRouter) -> None:
    assert (await make_router(sampling_defaults=DEFAULTS).get("/info")).json()["sampling_defaults"] == DEFAULTS
    assert (await make_router().get("/info")).json()["sampling_defaults"] == {}


def test_a_body_that_says_all_is_the_same() -> None:
    body = CompletionBody.model_validate({"prompt": "a", "temperature": 1.0})
    assert with_defaults(body, {"temperature": 0.5}) is body
    assert with_defaults(body, {}) is body
