"""Hostile and broken clients against one real server. After every test nothing may be held, and the same prompts must
still give the same tokens."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import psutil
import pytest
from hostile.attacks.leaving import leave_early
from hostile.invariants import Invariants
from support.metrics_text import metrics_of
from support.raw_http import deaf_client, generation, json_of, post, status_of, talk
from support.running_server import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.usefixtures("nothing_is_left")]

CONCURRENT, CONNECTIONS = 64, 400
HEAD = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
SETTINGS = {
    "MAX_CONNECTIONS": str(CONNECTIONS),
    "HEAD_TIMEOUT_SECONDS": "2",
    "BODY_TIMEOUT_SECONDS": "2",
    "STALLED_CLIENT_SECONDS": "30",  # longer than a slow machine needs to write what may be left unread
    "MAX_UNREAD_BYTES": "100000",
    "KEEP_ALIVE_SECONDS": "4",
    "PAYLOAD_LIMIT": "400000",
    "KSERVE_API": "true",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    cache = ("--max-batch-total-tokens", "2048", "--max-batch-prefill-tokens", "2048", "--max-total-tokens", "1536")
    with running_server("demo", "--max-concurrent-requests", str(CONCURRENT), *cache, environ=SETTINGS) as running:
        yield running


@pytest.fixture
def keepalive_expiry() -> float | None:
    """Seconds after which the client opens another connection rather than one that the server may be closing."""
    return 1.0


@pytest.fixture
async def client(server: RunningServer, keepalive_expiry: float | None) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=None, keepalive_expiry=keepalive_expiry)
    async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as opened:
        yield opened


async def ids(client: httpx.AsyncClient, tokens: int, inputs: str = "Once upon a time", **parameters: Any) -> list[int]:
    answer = await client.post("/generate", json=generation(tokens, inputs, **parameters))
    assert answer.status_code == 200, answer.text
    return ids_of(answer.json())


def ids_of(body: Any) -> list[int]:
    return [token["id"] for token in body["details"]["tokens"]]


async def counted(client: httpx.AsyncClient, name: str) -> float:
    return metrics_of((await client.get("/metrics")).text).get(name, 0)


@pytest.mark.long
async def test_two_hundred_at_once(server: RunningServer) -> None:
    """By hand: a busy client that takes seconds for its bodies would be answered 408."""
    request = post("/generate", generation(100))
    answers = await asyncio.gather(*(talk(server.port, request) for _ in range(200)))
    served = [ids_of(json_of(answer)) for answer in answers if status_of(answer) == 200]
    refused = [answer for answer in answers if status_of(answer) == 429]
    assert len(served) + len(refused) == 200, Counter(map(status_of, answers))
    assert len(served) >= CONCURRENT and refused
    assert all(tokens == served[0] for tokens in served)
    assert all(json_of(answer)["error_type"] == "overloaded" for answer in refused)
    assert all(re.search(rb"\r\nretry-after: [1-9]", answer) for answer in refused)


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2])
async def test_clients_that_leave_at_random_moments(server: RunningServer, seed: int) -> None:
    """`make soak` does ten thousand of these."""
    source = random.Random(seed)
    for _ in range(10):
        await asyncio.gather(*(leave_early(server.port, source) for _ in range(20)))


@pytest.mark.long
async def test_readers_that_never_read(server: RunningServer, client: httpx.AsyncClient) -> None:
    alone = await ids(client, 60)
    dropped = await counted(client, 'tgi_request_failure{err="dropped"}')
    bodies = [post("/generate_stream", generation(1200, top_n_tokens=5))] * 2
    chat = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 5}
    bodies.append(post("/v1/chat/completions", chat | {"max_tokens": 1000, "n": 3, "stream": True}))
    deaf = [await asyncio.to_thread(deaf_client, server.port, body) for body in bodies]
    try:
        healthy = await asyncio.gather(*(ids(client, 60) for _ in range(16)))
        assert all(tokens == alone for tokens in healthy)
        async with asyncio.timeout(60):
            while await counted(client, 'tgi_request_failure{err="dropped"}') < dropped + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        assert "its client has not read" in server.log()
    finally:
        for one in deaf:
            one.close()


@pytest.mark.long
async def test_slow_heads_and_bodies_beside_normal_traffic(server: RunningServer, client: httpx.AsyncClient) -> None:
    whole = post("/generate", generation(4))
    cuts = [0, 20, len(HEAD), len(whole) - 3]
    slow = [asyncio.create_task(talk(server.port, whole[: cuts[index % 4]])) for index in range(200)]
    alone = await ids(client, 50)
    while not all(task.done() for task in slow):
        assert await ids(client, 50) == alone
    assert {status_of(task.result()) for task in slow} == {408}


@pytest.mark.long
@pytest.mark.parametrize("keepalive_expiry", [None])
async def test_more_connections_than_there_may_be(server: RunningServer, client: httpx.AsyncClient) -> None:
    await ids(client, 4)  # its connection is one of those that stay
    # At once: the first is closed after some seconds without a head.
    opening = (asyncio.open_connection("127.0.0.1", server.port) for _ in range(CONNECTIONS + 20))
    held = await asyncio.gather(*opening)
    try:
        assert await ids(client, 4)
        refused = [await asyncio.wait_for(reader.read(), 60) for reader, _ in held[CONNECTIONS:]]
        by_status = {status_of(answer): answer for answer in refused}
        assert 503 in by_status and by_status.keys() <= {503, 408}  # 408: a machine that took seconds to open them
        assert json_of(by_status[503])["error_type"] == "overloaded"
    finally:
        for _, writer in held:
            writer.close()


@pytest.mark.parametrize("keepalive_expiry", [None])
async def test_no_descriptor_left(server: RunningServer, client: httpx.AsyncClient, invariants: Invariants) -> None:
    """Connections that cannot be accepted neither stop nor spin the accept loop."""
    router: psutil.Process = invariants.router
    alone = await ids(client, 20)
    before = router.rlimit(resource.RLIMIT_NOFILE)
    router.rlimit(resource.RLIMIT_NOFILE, (router.num_fds() + 10, before[1]))
    held: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
    try:
        for _ in range(60):
            with contextlib.suppress(OSError):
                held.append(await asyncio.open_connection("127.0.0.1", server.port))
        used = sum(router.cpu_times()[:2])
        for _ in range(3):
            assert await ids(client, 20) == alone, "who is connected is served"
        await asyncio.sleep(0.5)
        assert sum(router.cpu_times()[:2]) - used < 0.4
    finally:
        router.rlimit(resource.RLIMIT_NOFILE, before)
        for _, writer in held:
            writer.close()
    deadline = time.monotonic() + 60
    while status_of(await talk(server.port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")) != 200:
        assert time.monotonic() < deadline, "new connections are accepted again"
        await asyncio.sleep(0.2)


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (HEAD + b"x: " + b"a" * 1_000_000 + b"\r\n\r\n", {431}),
        (HEAD + b"".join(b"x-%d: 1\r\n" % index for index in range(20_000)) + b"\r\n", {431}),
        (HEAD + b"x: 1\r\n" * 254 + b"content-length: 2\r\n\r\n{}", {431}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nffffffffffffffffff\r\n", {400}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n", {400}),
        (HEAD + b"transfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n{}", {400}),
        (HEAD + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}", {400}),
        (HEAD + b"x: a\nb: c\r\rd\r\n\r\n", {400}),
        (HEAD + b"x : 1\r\ncontent-length: 2\r\n\r\n{}", {400}),
        (b"GET /health HTTP/3.7\r\n\r\n", {400}),
        (post("/generate", b"{" + b" " * 500_000), {413}),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n" + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 10, {413}),
        (HEAD + b"content-length: 99999999999999999999999\r\n\r\n{}", {400, 413}),
        (post("/generate", b'{"inputs":' + b"[" * 100_000), {400}),
        (post("/generate", b'{"inputs":"x","parameters":{"temperature":' + b"9" * 5000 + b"}}"), {422}),
        (post("/generate", b'{"inputs":"\\ud800"}'), {400}),
        (post("/generate", b'{"inputs":"\xff"}'), {400}),
    ],
    ids=range(17),
)
async def test_what_no_client_should_send(server: RunningServer, sent: bytes, statuses: set[int]) -> None:
    assert status_of(await talk(server.port, sent)) in statuses


async def test_an_idle_connection_is_closed(server: RunningServer) -> None:
    asked = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    assert status_of(await talk(server.port, asked, timeout_s=30)) == 200


async def test_one_connection_many_manners(server: RunningServer) -> None:
    sent = [
        post("/generate", generation(2), last=False),
        b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\n",
        b"DELETE /generate HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /nothing HTTP/1.1\r\nhost: x\r\n\r\n",
        post("/generate", b"[1", last=False),
        post("/generate_stream", generation(2), last=False),
        post("/generate", generation(2), last=True),
    ]
    answer = await talk(server.port, b"".join(sent))
    statuses = [int(piece[:3]) for piece in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [200, 200, 405, 404, 400, 200, 200]


async def test_more_tokens_than_the_cache_holds(client: httpx.AsyncClient) -> None:
    """Six answers of which five fit: one waits, and all get what they get alone."""
    info = (await client.get("/info")).json()
    tokens = info["max_batch_total_tokens"] // 6
    prompts = [f"Story number {index}" for index in range(2)]
    alone = {prompt: await ids(client, tokens, prompt) for prompt in prompts}
    answers = await asyncio.gather(*(ids(client, tokens, prompt) for prompt in prompts * 3))
    assert [answer == alone[prompt] for answer, prompt in zip(answers, prompts * 3, strict=True)] == [True] * 6


BOMBS: list[dict[str, Any]] = [
    {"type": "regex", "value": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    {"type": "regex", "value": "x{4294967295}"},
    {"type": "regex", "value": "(a|aa)*" * 400 + "b{2000}"},
    {"type": "regex", "value": "(?=a)b"},
    {"type": "regex", "value": "((("},
    {"type": "regex", "value": "(" * 5000 + ")" * 5000},
    {"type": "json", "value": {"$ref": "http://127.0.0.1:9/remote.json"}},
    {"type": "json", "value": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    {"type": "json", "value": {"type": "nonsense"}},
    {"type": "json", "value": {"type": "string", "pattern": "((a{1,999}){1,999}){1,999}"}},
    {"type": "json", "value": {"type": "string", "pattern": "["}},
    {"type": "json", "value": {"type": "array", "minItems": 10**12, "items": {"type": "integer"}}},
    {"type": "json", "value": {"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}},
    {"type": "json", "value": {"type": "object", "minProperties": 5, "maxProperties": 2}},
]


@pytest.mark.long
async def test_grammar_bombs_beside_other_traffic(client: httpx.AsyncClient) -> None:
    alone = await ids(client, 60)
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(30):
        nested = {"oneOf": [{"type": "array", "items": nested}, {"type": "object", "properties": {"a": nested}}]}
    many = {"type": "object", "properties": {f"p{index}": {"type": "integer"} for index in range(10_000)}}
    bombs = [*BOMBS, {"type": "json", "value": many}]

    async def ask(grammar: dict[str, Any]) -> httpx.Response:
        return await client.post("/generate", json=generation(8, grammar=grammar))

    asked = [asyncio.create_task(ask(bomb)) for bomb in bombs]
    num_beside = 0
    while not all(task.done() for task in asked):
        assert await ids(client, 60) == alone
        num_beside += 1
    assert num_beside
    for bomb, task in zip(bombs, asked, strict=True):
        answer = task.result()
        assert answer.status_code in (200, 422), (str(bomb)[:100], answer.text)
        assert "/usr" not in answer.text and ".py" not in answer.text, answer.text
    statuses = [task.result().status_code for task in asked]
    assert statuses[: len(BOMBS)].count(422) >= 10, statuses


async def test_tools_whose_patterns_backtrack_beside_other_traffic(client: httpx.AsyncClient) -> None:
    alone = await ids(client, 20)
    schema = {"type": "object", "propertyNames": {"pattern": "^(a|a)*$"}, "properties": {"a" * 40 + "!": {}}}
    user = {"role": "user", "content": "x"}
    function = {"type": "function", "name": "f", "parameters": schema}
    bodies: dict[str, dict[str, Any]] = {
        "/v1/chat/completions": {"messages": [user], "tools": [{"type": "function", "function": function}]},
        "/v1/responses": {"input": "x", "tools": [function]},
        "/v1/messages": {
            "model": "x", "max_tokens": 4, "messages": [user], "tools": [{"name": "f", "input_schema": schema}],
        },
    }  # fmt: skip
    for path, body in bodies.items():
        asked = asyncio.create_task(client.post(path, json=body))
        while not asked.done():
            assert await ids(client, 20) == alone
        assert asked.result().status_code == 400 and "takes too long" in asked.result().text, asked.result().text


async def test_stop_texts(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/generate", json=generation(60))).json()["generated_text"]
    stop = whole[20:27]  # whatever tokens it is cut into
    cut = whole[: whole.index(stop)]
    chat = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
    for stops in ([stop], [stop, stop[:4]], [stop[1:], stop], ["\N{GRINNING FACE}", stop]):
        first = min(whole.index(one) for one in stops if one in whole)
        answer = (await client.post("/v1/completions", json=chat | {"stop": stops})).json()
        assert answer["choices"][0]["text"] == whole[:first]
        assert answer["choices"][0]["finish_reason"] == "stop"
        streamed = (await client.post("/v1/completions", json=chat | {"stop": stops, "stream": True})).text
        events = [json.loads(line[5:]) for line in streamed.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events if event["choices"]) == whole[:first]
    native = (await client.post("/generate", json=generation(60, stop=[stop]))).json()
    assert native["generated_text"] == cut + stop
    assert (await client.post("/generate", json=generation(5, stop=["x" * 5000]))).status_code == 422
    assert (
        await client.post("/generate", json=generation(5, stop=["\N{GRINNING FACE}" * 1023] * 4))
    ).status_code == 422


@pytest.mark.long
async def test_bombs_of_numbers(client: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "x"}]
    for path, body in [
        ("/generate", generation(1, best_of=2**31)),
        ("/generate", generation(1, top_n_tokens=2**31)),
        ("/v1/chat/completions", {"messages": messages, "n": 10**6}),
        ("/v1/chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": 10**6}),
        ("/v1/chat/completions", {"messages": messages, "logit_bias": {str(n): 1 for n in range(1025)}}),
        ("/v1/chat/completions", {"messages": messages, "logit_bias": {"99999999": 1}}),
        ("/v1/chat/completions", {"messages": messages * 10_000}),
        ("/v1/completions", {"prompt": ["x"] * 10_000}),
        ("/v1/completions", {"prompt": "x", "n": 10**6, "best_of": 10**6}),
        ("/v1/completions", {"prompt": "x", "logprobs": 10**6}),
        ("/vertex", {"instances": [{"inputs": "x"}] * 10_000}),
        ("/generate", generation(1, "x " * 150_000)),
        ("/generate", generation(1, truncate=10**6)),
        ("/generate", generation(1, adapter_id="../../etc/passwd")),
        ("/generate", generation(1, adapter_id="https://127.0.0.1/x")),
    ]:
        answer = await client.post(path, json=body)
        expected = 400 if path.startswith("/v1/") else 422
        assert answer.status_code == expected, (path, str(body)[:100], answer.text)


async def test_everything_masked_but_the_forbidden(client: httpx.AsyncClient) -> None:
    """A grammar that only allows what a bias forbids: an end or a failure, never a forbidden token, never a loop."""
    spans = (await client.post("/tokenize", json={"inputs": "a"})).json()
    bias = {str(span["id"]): -100 for span in spans}
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "logit_bias": bias,
        "response_format": {"type": "regex", "value": "a"},
    }  # fmt: skip
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code in (200, 500), answer.text
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["message"]["content"] == "a", "a bias is no mask: the grammar wins"


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:{port}/x.png"}}],
        [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
    ],
)
async def test_images_are_refused_and_never_fetched(client: httpx.AsyncClient, content: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.setblocking(False)
        text = json.dumps(content).replace("{port}", str(trap.getsockname()[1]))
        body = {"messages": [{"role": "user", "content": json.loads(text)}], "max_tokens": 2}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 400
        with pytest.raises(BlockingIOError):
            trap.accept()


def test_only_the_http_port_is_open(server: RunningServer) -> None:
    """And nobody talks to the world."""
    for process in psutil.Process(server.process.pid).children(recursive=True):
        for connection in process.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN:
                assert connection.laddr.port == server.port, (process.cmdline(), connection)
            elif connection.raddr:
                assert connection.raddr.ip == "127.0.0.1", (process.cmdline(), connection)
