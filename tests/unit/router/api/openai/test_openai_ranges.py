"""Values that OpenAI's API and its common extensions allow, and what they mean."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from router_fakes import LIMITS, Router, is_invalid, message_of

MakeRouter = Callable[..., Router]

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
TEXT = ("/v1/completions", {"prompt": "Hi"})
RESPONSES = ("/v1/responses", {"input": "Hi"})
MESSAGES = ("/v1/messages", {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]})


@pytest.mark.parametrize("route", [CHAT, TEXT, MESSAGES], ids=["chat", "text", "messages"])
async def test_no_limit_of_candidates(router: Router, route: tuple[str, dict[str, Any]]) -> None:
    path, body = route
    for top_k in (0, -1):
        assert (await router.post(path, body | {"top_k": top_k})).status_code == 200
        assert router.scheduler.last.sampling.top_k == 0
    answer = await router.post(path, body | {"top_k": -2})
    assert is_invalid(answer) and "top_k" in message_of(answer)
    assert (await router.post(path, body | {"top_p": 0, "temperature": 1})).status_code == 200
    assert 0 < router.scheduler.last.sampling.top_p < 1e-5, "only the likeliest token is left"


@pytest.mark.parametrize("route", [CHAT, TEXT], ids=["chat", "text"])
async def test_seeds(router: Router, route: tuple[str, dict[str, Any]]) -> None:
    path, body = route
    for seed, means in ((0, 0), (7, 7), (-2, 2**64 - 2), (-(2**63), 2**63), (2**64 - 1, 2**64 - 1)):
        assert (await router.post(path, body | {"seed": seed})).status_code == 200
        assert router.scheduler.last.sampling.seed == means
    drawn = set()
    for _ in range(3):
        await router.post(path, body | {"seed": -1})
        drawn.add(router.scheduler.last.sampling.seed)
    assert len(drawn) == 3, "as without a seed"
    await router.post(path, body | {"seed": -2, "n": 3})
    assert [one.sampling.seed for one in router.scheduler.submitted[-3:]] == [2**64 - 2, 2**64 - 1, 0]


@pytest.mark.parametrize(
    ("route", "field"),
    [(CHAT, "max_tokens"), (CHAT, "max_completion_tokens"), (TEXT, "max_tokens"), (RESPONSES, "max_output_tokens")],
)
async def test_as_many_tokens_as_fit(router: Router, route: tuple[str, dict[str, Any]], field: str) -> None:
    path, body = route
    assert (await router.post(path, body)).status_code == 200
    most = router.scheduler.last.stopping.max_new_tokens
    assert (await router.post(path, body | {field: -1})).status_code == 200
    assert router.scheduler.last.stopping.max_new_tokens == most > 1024
    for wrong in (0, -2):
        answer = await router.post(path, body | {field: wrong})
        assert is_invalid(answer) and field in message_of(answer)
        assert answer.json()["error"]["code"] == "integer_below_min_value"


async def test_choices_alternatives_and_stop_texts(make_router: MakeRouter) -> None:
    router = make_router(limits=replace(LIMITS, max_concurrent_requests=200))
    for path, body in (CHAT, TEXT):
        answer = await router.post(path, body | {"n": 128})
        assert len(answer.json()["choices"]) == 128
        for fields in ({"n": 129}, {"stop": ["x"] * 65}):
            assert is_invalid(await router.post(path, body | fields))
        await router.post(path, body | {"stop": ["x"] * 64})
        assert len(router.scheduler.last.stopping.stop_sequences) == 64
    await router.post(CHAT[0], CHAT[1] | {"logprobs": True, "top_logprobs": 20})
    assert router.scheduler.last.top_n_tokens == 20
    await router.post(TEXT[0], TEXT[1] | {"logprobs": 20})
    assert router.scheduler.last.top_n_tokens == 20
    messages = MESSAGES[1] | {"stop_sequences": ["x"] * 64}
    assert (await router.post(MESSAGES[0], messages)).status_code == 200
    answer = await router.post(MESSAGES[0], MESSAGES[1] | {"stop_sequences": ["x"] * 65})
    assert is_invalid(answer) and "`stop_sequences` supports up to 64" in message_of(answer)
    native = {"inputs": "Hi", "parameters": {"stop": ["x"] * 5}}
    assert is_invalid(await router.post("/generate", native)), "the option's limit is TGI's routes'"
    router.assert_idle()


@pytest.mark.parametrize("key", ["0" * 15, "100000000000000", "1_0", " 7", "+5", "-1", "7 ", "07", "٣", "", "1.0"])
async def test_names_of_biases_that_are_no_token_ids(router: Router, key: str) -> None:
    for path, body in (CHAT, TEXT):
        answer = await router.post(path, body | {"logit_bias": {key: 5}})
        assert is_invalid(answer) and answer.json()["error"]["param"] == "logit_bias", key
    assert router.scheduler.submitted == []


async def test_biases_that_ask_for_nothing(router: Router) -> None:
    for biases in ({}, [], [0.0], [0, 0]):
        assert (await router.post(CHAT[0], CHAT[1] | {"logit_bias": biases})).status_code == 200
        assert router.scheduler.last.sampling.logit_bias == ()
    await router.post(CHAT[0], CHAT[1] | {"logit_bias": {"0": 1, "10": -1}})
    assert router.scheduler.last.sampling.logit_bias == ((0, 1.0), (10, -1.0))
