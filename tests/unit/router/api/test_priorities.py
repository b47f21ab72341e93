"""`priority` and `service_tier` reach the queue within what the key may ask for; so does `cache_salt`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from router_fakes import LIMITS, Router

from router.config import RouterConfig
from wire.keys import Key, digest_of

MakeRouter = Callable[..., Router]
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "model": "tgi", "max_tokens": 2}
CHAT, TEXT = ("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "x", "max_tokens": 2})
RESPONSES, MESSAGES = ("/v1/responses", {"input": "x"}), ("/v1/messages", HELLO)
TIERED = (CHAT, TEXT, RESPONSES)
PRIORITIES = replace(LIMITS, has_priorities=True)


def asked(path: str, body: dict[str, Any], fields: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return path, (body | {"parameters": fields} if path.startswith("/generate") else body | fields)


ALL = (*TIERED, MESSAGES, ("/generate", {"inputs": "x"}), ("/generate_stream", {"inputs": "x"}))


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_a_priority_is_the_requests(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router(limits=PRIORITIES)
    for given, found in ((-(2**63), -(2**63)), (7, 7), (0, 0), (None, 0)):
        assert (await router.post(*asked(path, body, {"priority": given}))).status_code == 200
        assert router.scheduler.last.priority == found
    for wrong in (2**63, 1.5, "1"):
        assert (await router.post(*asked(path, body, {"priority": wrong}))).status_code in (400, 422)


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_a_salt_parts_the_cache(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router()
    spaces = []
    for salt in (None, "a", "b", "b", "x" * 1024):
        assert (await router.post(*asked(path, body, {"cache_salt": salt}))).status_code == 200
        spaces.append(router.scheduler.last.cache_namespace)
    assert spaces[0] == "" and spaces[2] == spaces[3] and len(set(spaces)) == 4
    for wrong in ("", "x" * 1025, 1):
        answer = await router.post(*asked(path, body, {"cache_salt": wrong}))
        assert answer.status_code in (400, 422) and "cache_salt" in answer.text
    router.assert_idle()


@pytest.mark.parametrize(("path", "body"), ALL)
async def test_without_priorities_one_is_refused(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router()
    assert (await router.post(*asked(path, body, {"priority": 0}))).status_code == 200
    answer = await router.post(*asked(path, body, {"priority": -1}))
    assert answer.status_code in (400, 422) and "`priority` is not served here" in answer.text
    assert "--scheduling-policy priority" in answer.text
    router.assert_idle()


def _events(stream: str) -> list[str]:
    return [block.partition("data: ")[2] for block in stream.removesuffix("\n\n").split("\n\n")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), TIERED)
async def test_a_tier_is_a_priority_and_is_said(
    make_router: MakeRouter, path: str, body: dict[str, Any], stream: bool
) -> None:
    router = make_router(limits=PRIORITIES)
    for given, priority, said in (("flex", 1, "flex"), ("priority", -1, "priority"), ("auto", 0, "default"),
                                  ("default", 0, "default"), (None, 0, None)):  # fmt: skip
        answer = await router.post(path, body | {"service_tier": given, "stream": stream})
        assert answer.status_code == 200 and router.scheduler.last.priority == priority
        place = 0 if path != RESPONSES[0] else -1
        whole = answer.json() if not stream else json.loads(_events(answer.text)[place])
        assert whole.get("response", whole).get("service_tier") == said


@pytest.mark.parametrize(("path", "body"), TIERED)
async def test_tiers_that_are_refused(make_router: MakeRouter, path: str, body: dict[str, Any]) -> None:
    router = make_router()
    for tier in ("auto", "default"):
        assert (await router.post(path, body | {"service_tier": tier})).status_code == 200
    for tier in ("flex", "priority", "scale", "standard_only"):
        answer = await router.post(path, body | {"service_tier": tier})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "service_tier"
    router = make_router(limits=PRIORITIES)
    answer = await router.post(path, body | {"service_tier": "flex", "priority": 1})
    assert answer.status_code == 400 and "give one of them" in answer.json()["error"]["message"]


async def test_anthropics_tiers(make_router: MakeRouter) -> None:
    router = make_router()
    for tier in ("auto", "standard_only"):
        answer = await router.post(MESSAGES[0], HELLO | {"service_tier": tier})
        assert answer.status_code == 200 and answer.json()["usage"]["service_tier"] == "standard"
    assert (await router.post(MESSAGES[0], HELLO | {"service_tier": "priority"})).status_code == 400


async def test_a_key_bounds_it(make_router: MakeRouter) -> None:
    keys = [Key(name=name, digest=digest_of(name.encode()), priority=least) for name, least in (("a", 0), ("b", -2))]
    router = make_router(limits=PRIORITIES, keys=keys)
    for key, given, found in (("a", -5, 0), ("a", 3, 3), ("b", -5, -2), ("b", -1, -1), ("b", 0, 0)):
        await router.post(*asked(*CHAT, {"priority": given}), authorization=f"Bearer {key}")
        assert router.scheduler.last.priority == found
    answer = await router.post(*asked(*CHAT, {"service_tier": "priority"}), authorization="Bearer a")
    assert answer.json()["service_tier"] == "default"


@pytest.mark.parametrize(
    ("policy", "has_keys", "has_priorities"),
    [(None, False, False), (None, True, True), ("fcfs", True, False), ("priority", False, True)],
)
def test_who_has_priorities(policy: Any, has_keys: bool, has_priorities: bool) -> None:
    config = RouterConfig(scheduling_policy=policy, keys_file=Path("keys.yaml") if has_keys else None)
    assert config.has_priorities is has_priorities


async def test_the_queue_of_each_key_is_a_metric(make_router: MakeRouter) -> None:
    router = make_router(keys=[Key(name="a", digest=digest_of(b"a"))])
    router.scheduler.queued_by_key = {"a": 3, "gone": 2, "": 4}
    text = router.metrics.render().decode()
    assert 'tgi_key_queue_size{key="a"} 3' in text and 'tgi_key_queue_size{key="other"} 2' in text
    router.scheduler.queued_by_key = {}
    assert 'tgi_key_queue_size{key="a"} 0' in router.metrics.render().decode()
