"""Keys of a file over HTTP: who is let in, and each API's words for who is not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from router_fakes import INFO, FakeScheduler, Router, says

from router.config import RouterConfig
from wire.keys import Key, digest_of

MakeRouter = Callable[..., Router]


def key(name: str = "alice", **changes: Any) -> Key:
    return Key(name=name, digest=digest_of(f"tk-{name}".encode()), **changes)


CHAT = {"model": "some/model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
TGI, OPENAI, ANTHROPIC = ("/generate", {"inputs": "x"}), ("/v1/chat/completions", CHAT), ("/v1/messages", CHAT)
ALL = (TGI, OPENAI, ANTHROPIC)
ALICE = {"authorization": "Bearer tk-alice"}


def kind_of(answer: httpx.Response) -> tuple[str | None, ...]:
    """The words by which a client of each API knows the error."""
    body = answer.json()
    if answer.request.url.path == "/generate":
        return (body["error_type"],)
    error = body["error"]
    return (error["type"],) if body.get("type") == "error" else (error["type"], error["code"])


@pytest.mark.parametrize("given", [{}, {"authorization": "Bearer tk-bob"}, {"authorization": "Basic tk-alice"}])
async def test_a_missing_or_wrong_key(make_router: MakeRouter, given: dict[str, str]) -> None:
    router = make_router(keys=[key()])
    kinds = [("unauthorized",), ("invalid_request_error", "invalid_api_key"), ("authentication_error",)]
    for (path, body), kind in zip(ALL, kinds, strict=True):
        answer = await router.post(path, body, **given)
        assert (answer.status_code, kind_of(answer)) == (401, kind)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert (await router.get("/info")).status_code == (await router.get("/metrics")).status_code == 200
    assert router.scheduler.submitted == []


async def test_a_key_is_let_in_on_every_api(make_router: MakeRouter) -> None:
    router = make_router(keys=[key(), key("bob")])
    for path, body in ALL:
        for name in ("alice", "bob"):
            assert (await router.post(path, body, authorization=f"Bearer tk-{name}")).status_code == 200
    assert (await router.post(*ANTHROPIC, x_api_key="tk-bob")).status_code == 200
    text = router.metrics.render().decode()
    assert 'tgi_key_requests{key="alice"} 3' in text and 'tgi_key_requests{key="bob"} 4' in text


async def test_a_limit_is_said_in_each_apis_words(make_router: MakeRouter) -> None:
    router = make_router(keys=[key(requests_per_minute=1)], clock=lambda: 5.0)
    assert (await router.post(*OPENAI, **ALICE)).status_code == 200
    kinds = [("overloaded",), ("requests", "rate_limit_exceeded"), ("rate_limit_error",)]
    for (path, body), kind in zip(ALL, kinds, strict=True):
        answer = await router.post(path, body, **ALICE)
        assert (answer.status_code, kind_of(answer), answer.headers["retry-after"]) == (429, kind, "60")
        prefix = "anthropic-ratelimit-requests-" if path == "/v1/messages" else "x-ratelimit-{}-requests"
        names = [prefix.format(one) if "{" in prefix else prefix + one for one in ("limit", "remaining", "reset")]
        found = [answer.headers[name] for name in names]
        assert found[:2] == ["1", "0"] and (found[2].endswith("Z") or found[2] == "1m0s")
    text = router.metrics.render().decode()
    assert 'tgi_key_refused{key="alice",reason="requests"} 3' in text
    assert 'tgi_request_refused{reason="rate_limit"} 3' in text
    router.assert_idle()


async def test_tokens_are_charged_as_they_come(make_router: MakeRouter) -> None:
    router = make_router(lambda request: says(" one", " two", " three"), keys=[key(tokens_per_minute=4)],
                         clock=lambda: 5.0)  # fmt: skip
    first = await router.post("/generate_stream", {"inputs": "x"}, **ALICE)
    assert first.status_code == 200 and first.headers["x-ratelimit-remaining-tokens"] == "2"
    answer = await router.post(*OPENAI, **ALICE)
    assert (answer.status_code, kind_of(answer)) == (429, ("tokens", "rate_limit_exceeded"))
    text = router.metrics.render().decode()
    assert 'tgi_key_tokens{key="alice",kind="prompt"} 2' in text
    assert 'tgi_key_tokens{key="alice",kind="output"} 3' in text


async def test_a_stream_counts_until_its_end(make_router: MakeRouter) -> None:
    router = make_router(keys=[key(concurrent=1)])
    for _ in range(2):
        assert (await router.post("/generate_stream", {"inputs": "x"}, **ALICE)).status_code == 200
    account = router.accounts.find(b"tk-alice")
    account.admit()
    answer = await router.post(*OPENAI, **ALICE)
    assert (answer.status_code, kind_of(answer)) == (429, ("concurrency", "rate_limit_exceeded"))
    account.end()
    assert (await router.post(*OPENAI, **ALICE)).status_code == 200 and account.num_running == 0


async def test_scopes(make_router: MakeRouter) -> None:
    router = make_router(keys=[key(), key("prom", scopes=frozenset({"metrics"}))])
    assert (await router.get("/metrics")).status_code == 401
    assert (await router.request("GET", "/metrics", headers=ALICE)).status_code == 403
    prom = {"authorization": "Bearer tk-prom"}
    assert (await router.request("GET", "/metrics", headers=prom)).status_code == 200
    kinds = [("forbidden",), ("invalid_request_error", "permission_denied"), ("permission_error",)]
    for (path, body), kind in zip(ALL, kinds, strict=True):
        answer = await router.post(path, body, **prom)
        assert (answer.status_code, kind_of(answer)) == (403, kind)
    answer = await router.post("/v1/load_lora_adapter", {}, **ALICE)
    assert answer.status_code == 403


async def test_models(make_router: MakeRouter) -> None:
    config = RouterConfig(tokenizer_name="some/model", served_model_name=("chat",))
    keys = [key(models=frozenset({"chat"})), key("bob", models=frozenset({"other"}))]
    router = make_router(config=config, keys=keys, info=INFO)
    assert (await router.post(*OPENAI, **ALICE)).status_code == 200
    answer = await router.post(*OPENAI, authorization="Bearer tk-bob")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    router.assert_idle()


async def test_the_longest_request_of_a_key(make_router: MakeRouter) -> None:
    scheduler = FakeScheduler()
    router = make_router(scheduler=scheduler, keys=[key(max_total_tokens=10), key("bob", has_own_cache=True, weight=2)])
    assert (await router.post("/generate", {"inputs": "x"}, **ALICE)).status_code == 200
    assert scheduler.last.input_length + scheduler.last.stopping.max_new_tokens == 10
    body = {"inputs": "x", "parameters": {"max_new_tokens": 50}}
    assert (await router.post("/generate", body, **ALICE)).status_code == 422
    assert (await router.post("/generate", body, authorization="Bearer tk-bob")).status_code == 200
    assert (scheduler.last.key, scheduler.last.weight) == ("bob", 2)
    assert scheduler.last.cache_namespace == "\nbob" and scheduler.submitted[0].cache_namespace == ""
    # No client gets at the cache of another key by a salt.
    body["parameters"] = {"cache_salt": "bob", "max_new_tokens": 2}
    spaces = {"\nbob"}
    for who in (ALICE, {"authorization": "Bearer tk-bob"}):
        assert (await router.post("/generate", body, **who)).status_code == 200
        spaces.add(scheduler.last.cache_namespace)
    assert len(spaces) == 3


async def test_a_key_is_in_no_log_and_its_name_is(make_router: MakeRouter, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    router = make_router(keys=[key(requests_per_minute=1)])
    for _ in range(2):
        await router.post("/generate", {"inputs": "x"}, **ALICE)
    await router.post("/generate", {"inputs": "x"}, authorization="Bearer tk-stranger")
    assert "tk-" not in caplog.text and digest_of(b"tk-alice").hex() not in caplog.text
    assert {getattr(record, "key", None) for record in caplog.records if record.message in ("Success",)} == {"alice"}
    (line,) = [record.message for record in caplog.records if record.message.startswith("429 POST")]
    assert "key alice" in line and "reason=rate_limit" in line
