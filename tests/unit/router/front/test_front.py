"""The front: which model, waiting for it, passing on, its own routes, and the ends of models."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from router_fakes import until

from wire.keys import Key, digest_of

from .conftest import Serve, Served

CHAT = "/v1/chat/completions"


async def two(serve_front: Serve, **options: Any) -> Served:
    """A model that is loaded, one that is not, and an embedder that is."""
    served = await serve_front(**options)
    served.launcher.add("chat", aliases=["gpt-4o"], preload=True)
    served.launcher.add("org/other")
    served.launcher.add("embed", task="embed")
    for name in ("chat", "embed"):
        await served.launcher.load(name)
    return served


@pytest.mark.parametrize(
    ("path", "headers", "body", "model"),
    [
        (CHAT, {}, {"model": "chat"}, "chat"),
        (CHAT, {}, {"model": "gpt-4o"}, "chat"),
        (CHAT, {}, {"model": "chat-lora"}, "chat"),
        (CHAT, {"x-tercet-model": "embed"}, {"model": "chat"}, "embed"),
        (f"/models/chat{CHAT}", {"x-tercet-model": "embed"}, {"model": "x"}, "chat"),
        ("/models/gpt-4o/generate", {}, {}, "chat"),
        ("/models/chat", {}, {}, "chat"),
        ("/generate?model=chat", {}, {}, "chat"),
        ("/v1/embeddings", {}, {}, "embed"),
        ("/embed", {}, {"model": "tgi"}, "embed"),
    ],
)
async def test_the_model_of_a_request(
    serve_front: Serve, path: str, headers: dict[str, str], body: dict[str, str], model: str
) -> None:
    served = await two(serve_front)
    answer = await served.client.post(path, json=body, headers=headers)
    assert (answer.status_code, answer.json()) == (200, {"model": model})
    name, line, sent, raw = served.upstreams.asked[-1]
    assert name == model
    assert line == f"POST {path.removeprefix('/models/chat').removeprefix('/models/gpt-4o') or '/'} HTTP/1.1"
    assert json.loads(raw) == body
    assert not any(name.startswith("x-tercet-") for name in sent)
    assert sent["x-request-id"] == answer.headers["x-request-id"]
    assert answer.headers["x-of"] == "model"


async def parts_of(content: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(content), size):
        yield content[start : start + size]
        await asyncio.sleep(0)


async def test_an_upload_of_any_size_is_passed_on_as_it_comes(serve_front: Serve) -> None:
    served = await two(serve_front, payload_limit=1000)
    content = bytes(range(256)) * 8000
    for size in (1000, 70_000):
        for _ in range(2):  # the connection is used again
            answer = await served.client.post("/models/chat/v1/files", content=parts_of(content, size))
            assert (answer.status_code, answer.json()) == (200, {"model": "chat"})
            assert served.upstreams.asked[-1][1] == "POST /v1/files HTTP/1.1"
            assert served.upstreams.asked[-1][3] == content
    assert (await served.client.post("/models/chat/generate", content=content)).status_code == 413
    assert (await served.client.post("/v1/files?model=chat", content=b"")).json() == {"model": "chat"}


async def test_an_upload_ends_where_it_is_refused(serve_front: Serve) -> None:
    served = await two(serve_front)
    served.upstreams.refusing.add("chat")
    served.upstreams.answers["chat"] = b"HTTP/1.1 413 Too Large\r\ncontent-length: 2\r\n\r\n{}"
    num_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_read
        while True:
            yield b"x" * 10_000
            num_read += 1
            await asyncio.sleep(0)

    for _ in range(2):
        answer = await served.client.post("/models/chat/v1/files", content=endless())
        assert (answer.status_code, answer.content) == (413, b"{}") and num_read < 10_000


async def test_an_upload_to_a_model_that_ends_fails(serve_front: Serve) -> None:
    served = await two(serve_front)
    served.upstreams.answers["chat"] = b""
    answer = await served.client.post("/models/chat/v1/files", content=b"x" * 100_000)
    assert answer.status_code == 500 and "have ended" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        (CHAT, b"{}", 400, "model_required"),
        (CHAT, b'{"model": "tgi"}', 400, "model_required"),
        (CHAT, b'{"model": "nope"}', 404, "model_not_found"),
        (CHAT, b'{"model": ', 400, None),
        ("/models/nope/v1/chat/completions", b"{}", 404, "model_not_found"),
        ("/v1/models/load", b"{}", 400, "model_required"),
        ("/v1/models/unload", b'{"model": "nope"}', 404, "model_not_found"),
    ],
)
async def test_what_is_refused(serve_front: Serve, path: str, content: bytes, status: int, code: str | None) -> None:
    served = await two(serve_front)
    num_asked = len(served.upstreams.asked)
    answer = await served.client.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status
    error = answer.json()["error"]
    if isinstance(error, dict):
        assert error["code"] == code
    if code is not None:
        assert "chat, org/other, embed" in str(error)
    assert len(served.upstreams.asked) == num_asked


@pytest.mark.parametrize("path", ["/v2/rerank", "/score", "/classify"])
async def test_routes_of_rerankers_have_openais_errors(serve_front: Serve, path: str) -> None:
    served = await two(serve_front)
    answer = await served.client.post(path, json={"model": "nope"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_default_model(serve_front: Serve) -> None:
    served = await two(serve_front, default_model="chat")
    assert (await served.client.post(CHAT, json={})).json() == {"model": "chat"}
    assert (await served.client.post("/embed", json={})).json() == {"model": "embed"}


async def test_a_request_waits_for_its_model(serve_front: Serve) -> None:
    served = await two(serve_front, max_waiting_requests=2)
    asked = [asyncio.create_task(served.client.post(CHAT, json={"model": "org/other"})) for _ in range(2)]
    await until(lambda: served.models.by_name["org/other"].num_waiting == 2)
    await until(lambda: any(one.get("usage", {}).get("org/other", [0, 0])[1] for one in served.launcher.said))
    refused = await served.client.post(CHAT, json={"model": "org/other"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
    assert "retry-after" in refused.headers
    assert 'tgi_model_requests_waiting{model="org/other"} 2' in (await served.client.get("/metrics")).text
    served.launcher.models["org/other"]["state"] = "loading"
    await served.launcher.tell()
    path = await served.upstreams.start("other")
    served.launcher.models["org/other"] |= {"state": "loaded", "socket": path, "num_loaded": 1}
    await served.launcher.tell()
    assert [one.json() for one in await asyncio.gather(*asked)] == [{"model": "other"}] * 2


async def test_a_start_that_takes_too_long_or_fails(serve_front: Serve) -> None:
    served = await two(serve_front, model_start_timeout=1)
    late = await served.client.post(CHAT, json={"model": "org/other"})
    assert (late.status_code, late.json()["error"]["code"]) == (503, "model_loading")
    assert int(late.headers["retry-after"]) >= 1
    asked = asyncio.create_task(served.client.post("/models/org/other/generate", json={}))
    await asyncio.sleep(0.05)
    served.launcher.models["org/other"] |= {
        "state": "failed", "error": "damaged", "num_failed": 1, "retry_at": time.monotonic() + 9
    }  # fmt: skip
    await served.launcher.tell()
    for failed in (await asked, await served.client.post("/models/org/other/generate", json={})):
        assert (failed.status_code, failed.json()["error_type"]) == (503, "model_failed")
        assert "(damaged)" in failed.json()["error"]
        assert 7 <= int(failed.headers["retry-after"]) <= 9
    cards = (await served.client.get("/v1/models")).json()["data"]
    status = next(card["status"] for card in cards if card["id"] == "org/other")
    assert (status["value"], status["error"]) == ("failed", "damaged")


async def test_requests_that_load_nothing(serve_front: Serve) -> None:
    served = await two(serve_front, no_autoload=True)
    answer = await served.client.post(CHAT, json={"model": "org/other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_loaded")
    assert "/v1/models/load" in answer.json()["error"]["message"]


async def test_a_model_is_let_go_only_without_requests(serve_front: Serve) -> None:
    served = await two(serve_front)
    served.upstreams.hold["chat"] = asyncio.Event()
    running = asyncio.create_task(served.client.post(CHAT, json={"model": "chat"}))
    await until(lambda: served.models.by_name["chat"].num_active == 1)
    await served.launcher.send(release="chat", may_wait=False)
    assert await served.launcher.until("kept") == "chat"
    await served.launcher.send(release="chat", may_wait=True)
    later = asyncio.create_task(served.client.post(CHAT, json={"model": "chat"}))
    await asyncio.sleep(0.05)
    assert not any("released" in message for message in served.launcher.said)
    served.upstreams.hold["chat"].set()
    assert (await running).status_code == 200
    assert await served.launcher.until("released") == "chat"
    assert not later.done()  # it waits for the next start
    served.launcher.models["chat"]["state"] = "unloaded"
    await served.launcher.tell()
    served.launcher.models["chat"]["state"] = "loaded"
    await served.launcher.tell()
    assert (await later).status_code == 200
    await served.launcher.send(release="embed", may_wait=False)
    assert await served.launcher.until("released") == "embed"


@pytest.mark.parametrize(
    ("path", "last"),
    [
        (CHAT, '"code":null}'),
        ("/generate_stream", '"error_type":"generation"'),
        ("/v1/messages", "event: error"),
        ("/v1/responses", "event: error"),
    ],
)
async def test_a_stream_that_is_cut_says_so(serve_front: Serve, path: str, last: str) -> None:
    served = await two(serve_front)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    served.upstreams.answers["chat"] = head + b"9\r\ndata: 1\n\n\r\n"
    answer = await served.client.post(path, json={"model": "chat"}, headers={"x-tercet-model": "chat"})
    assert answer.status_code == 200
    assert answer.text.startswith("data: 1\n\n")
    assert last in answer.text
    assert "have ended" in answer.text


async def test_a_model_that_ends_before_it_answers(serve_front: Serve) -> None:
    served = await two(serve_front)
    served.upstreams.answers["chat"] = b""
    served.upstreams.hold["chat"] = asyncio.Event()
    asyncio.get_running_loop().call_later(0.3, served.upstreams.hold["chat"].set)
    answer = await served.client.post(CHAT, json={"model": "chat"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")


async def test_a_request_that_meets_ended_processes_waits_for_their_next_start(serve_front: Serve) -> None:
    served = await two(serve_front)
    await served.upstreams.stop("chat")
    for connection in served.models.by_name["chat"].upstream._idle:  # type: ignore[union-attr]
        connection.transport.abort()
    asked = asyncio.create_task(served.client.post(CHAT, json={"model": "chat"}))
    await asyncio.sleep(0.05)
    served.launcher.models["chat"]["state"] = "unloaded"
    await served.launcher.tell()
    await served.launcher.load("chat")
    assert (await asked).json() == {"model": "chat"}


async def test_loading_and_unloading(serve_front: Serve) -> None:
    served = await two(serve_front)
    load = asyncio.create_task(served.client.post("/v1/models/load", json={"model": "org/other"}))
    assert await served.launcher.until("load") == "org/other"
    await served.launcher.send(done=0, error="")
    assert (await load).json()["id"] == "org/other"
    load = asyncio.create_task(served.client.post("/v1/models/load", json={"model": "gpt-4o"}))
    assert await served.launcher.until("load") == "chat"
    await served.launcher.send(done=1, error="no memory")
    assert (await load).status_code == 503
    assert "no memory" in (await load).json()["error"]["message"]
    unload = asyncio.create_task(served.client.post("/v1/models/unload", json={"model": "chat"}))
    assert await served.launcher.until("unload") == "chat"
    await served.launcher.send(done=2, error="")
    assert (await unload).status_code == 200


async def test_lists_of_models(serve_front: Serve) -> None:
    served = await two(serve_front)
    cards = {card["id"]: card for card in (await served.client.get("/v1/models")).json()["data"]}
    assert [*cards] == ["chat", "chat-lora", "org/other", "embed", "embed-lora"]
    assert cards["chat"]["status"]["value"] == "loaded"
    assert (cards["chat"]["max_model_len"], cards["chat"]["aliases"]) == (7, ["gpt-4o"])
    assert cards["org/other"]["status"]["value"] == "unloaded"
    assert cards["chat-lora"]["parent"] == "chat"
    assert cards["embed"]["task"] == "embed"
    assert (await served.client.get("/v1/models/gpt-4o")).json()["owned_by"] == "chat"
    assert (await served.client.get("/v1/models/nope")).status_code == 404
    listed = await served.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert (listed.json()["first_id"], listed.json()["last_id"]) == ("chat", "embed-lora")


async def test_health(serve_front: Serve) -> None:
    served = await two(serve_front)
    for path, status in (
        ("/health", 200), ("/ping", 200), ("/", 200), ("/health?model=chat", 200), ("/health?model=org/other", 503),
        ("/health?model=nope", 404),
    ):  # fmt: skip
        assert (await served.client.get(path)).status_code == status, path
    assert "<html" in (await served.client.get("/", headers={"accept": "text/html"})).text
    served.launcher.is_well = False
    await served.launcher.tell()
    assert (await served.client.get("/health")).status_code == 503
    served.models.is_draining = True
    answer = await served.client.post(CHAT, json={"model": "chat"})
    assert (answer.status_code, answer.headers["connection"]) == (503, "close")


async def test_keys(serve_front: Serve) -> None:
    keys = [
        Key(name="a", digest=digest_of(b"tk-a"), models=frozenset({"chat"}), requests_per_minute=2),
        Key(name="b", digest=digest_of(b"tk-b"), scopes=frozenset({"admin"})),
    ]
    served = await two(serve_front, keys=keys)

    async def ask(key: str, path: str, model: str) -> tuple[int, Any]:
        answer = await served.client.post(path, json={"model": model}, headers={"authorization": f"Bearer {key}"})
        error = answer.json().get("error")
        return answer.status_code, error["code"] if isinstance(error, dict) else None

    assert await ask("tk-x", CHAT, "chat") == (401, "invalid_api_key")
    assert await ask("tk-a", CHAT, "gpt-4o") == (200, None)
    assert await ask("tk-a", CHAT, "org/other") == (403, "model_not_allowed")
    assert await ask("tk-a", CHAT, "chat") == (429, "rate_limit_exceeded")
    assert await ask("tk-a", "/v1/models/load", "chat") == (403, "permission_denied")
    assert await ask("tk-b", CHAT, "chat") == (403, "permission_denied")


async def test_an_answer_larger_than_what_is_buffered(serve_front: Serve) -> None:
    served = await two(serve_front)
    body = bytes(3 << 20)
    served.upstreams.answers["chat"] = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    answer = await served.client.get("/info?model=chat")
    assert answer.content == body
