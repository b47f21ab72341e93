"""Hostile and random requests against a running server: no 5xx, no hang, nothing left behind.

The random ones come from our own OpenAPI document, seeded. After each test the KV blocks are free, the queue is empty,
descriptors and threads are where they were, and an ordinary request gives the ids that it gave before.
"""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import hypothesis
import psutil
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from support.effort import examples
from support.running_server import RunningServer, running_server

pytestmark = [pytest.mark.e2e, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

BLOCK = 16
TOTAL = 8 * BLOCK
CAPACITY = 4 * TOTAL
PLACES = 12
ANSWER_LIMIT_S = 60.0
"""Longer means a hang."""
SECONDS_PER_ROUTE = examples(3, 20)
CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_headers_conformance,
    response_schema_conformance,
]  # fmt: skip
ORDINARY = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 24, "details": True, "ignore_eos": True}}
GENERATE = "/generate"
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(
        "demo", "--max-total-tokens", str(TOTAL), "--max-input-tokens", str(TOTAL - 8), "--max-batch-prefill-tokens",
        str(TOTAL), "--max-batch-total-tokens", str(CAPACITY), "--max-concurrent-requests", str(PLACES),
    ) as running:  # fmt: skip
        yield running


class Baseline:
    """What an untouched server looks like, and whether it looks like that again."""

    def __init__(self, server: RunningServer) -> None:
        self._url = server.url
        self.ids = self._ordinary()
        self._processes = psutil.Process(server.process.pid).children(recursive=True)
        self._idle()
        self._threads = self._count("num_threads")
        self._descriptors = self._count("num_fds")

    def check(self) -> None:
        """Raises AssertionError if the server has lost anything."""
        gauges = self._idle()
        assert gauges["tgi_kv_blocks_live"] == 0
        assert self._ordinary() == self.ids
        with httpx.Client(base_url=self._url, timeout=ANSWER_LIMIT_S) as client:
            assert client.get("/health").status_code == 200
            # The largest request there can be.
            body = {"inputs": "Hi", "parameters": {"max_new_tokens": TOTAL - 8, "ignore_eos": True, "details": True}}
            details = client.post(GENERATE, json=body).json()["details"]
            assert details["generated_tokens"] == TOTAL - 8
        assert all(process.is_running() for process in self._processes)
        # Idle connections and the process that checks grammars may come or go.
        assert self._count("num_threads") <= self._threads + 8
        assert self._count("num_fds") <= self._descriptors + 16

    def _ordinary(self) -> list[int]:
        answer = httpx.post(f"{self._url}{GENERATE}", json=ORDINARY, timeout=ANSWER_LIMIT_S)
        assert answer.status_code == 200, answer.text
        return [token["id"] for token in answer.json()["details"]["tokens"]]

    def _idle(self) -> dict[str, float]:
        """The gauges once nothing runs any more."""
        deadline = time.monotonic() + ANSWER_LIMIT_S
        while True:
            text = httpx.get(f"{self._url}/metrics", timeout=ANSWER_LIMIT_S).text
            lines = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tgi_") and "{" not in line]
            gauges = {name: float(value) for name, value in lines}
            if gauges["tgi_queue_size"] == 0 == gauges["tgi_batch_current_size"]:
                return gauges
            assert time.monotonic() < deadline, "requests run that nobody waits for"
            time.sleep(0.05)

    def _count(self, what: str) -> int:
        return sum(getattr(process, what)() for process in self._processes)


@pytest.fixture(scope="module")
def baseline(server: RunningServer) -> Baseline:
    return Baseline(server)


@pytest.fixture(autouse=True)
def nothing_is_left(baseline: Baseline) -> Iterator[None]:
    yield
    baseline.check()


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=ANSWER_LIMIT_S) as opened:
        yield opened


@pytest.mark.random
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda mode: mode.value)
def test_random_requests_of_our_own_document(server: RunningServer, mode: GenerationMode) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/api-doc/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) > 12
    statuses: dict[str, set[int]] = {}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue  # nothing to get wrong
        statuses[operation.label] = _fuzzed(operation, mode)
    posts = {label: seen for label, seen in statuses.items() if label.startswith("POST")}
    assert len(posts) >= 9
    if mode is GenerationMode.POSITIVE:
        assert all(200 in seen for seen in posts.values()), posts
    else:
        # Few cases for each route: all of one may happen to be no JSON at all.
        assert all(seen & {400, 422} for seen in posts.values()), posts
        assert sum(422 in seen for seen in posts.values()) > len(posts) / 2, posts


def _fuzzed(operation: Any, mode: GenerationMode) -> set[int]:
    """The statuses that seeded requests of one route were answered with: a few, more until one that is wanted."""
    statuses: set[int] = set()
    wanted = {200} if mode is GenerationMode.POSITIVE else {400, 422}
    until = time.monotonic() + SECONDS_PER_ROUTE
    few = examples(5, 20) if operation.method == "post" else 2
    left = [few]

    @hypothesis.seed(20)
    @hypothesis.settings(
        max_examples=4 * few, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )  # fmt: skip
    @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        left[0] -= 1
        if statuses & wanted and (left[0] < 0 or time.monotonic() > until):
            return
        response = case.call(timeout=ANSWER_LIMIT_S)
        statuses.add(response.status_code)
        is_stream = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        case.validate_response(response, checks=CHECKS[:2] if is_stream else CHECKS)

    run()
    return statuses


def _chat(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4} | fields


def _native(**parameters: Any) -> dict[str, Any]:
    return {"inputs": "Hi", "parameters": {"max_new_tokens": 4} | parameters}


def _said(content: Any, **message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} | message], "max_tokens": 4}


def _schema(schema: Any) -> dict[str, Any]:
    return _native(grammar={"type": "json", "value": schema})


def _regex(expression: str) -> dict[str, Any]:
    return _native(grammar={"type": "regex", "value": expression})


def _nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"oneOf": [schema, {"type": "null"}]}
    return schema


_DEEP = b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
_TOOL = {"type": "function", "function": {"name": "f"}}
HOSTILE: list[tuple[str, str, Any, set[int]]] = [
    ("E4 nested arrays", GENERATE, _DEEP, {400}),
    ("E4 nested objects", CHAT, b'{"messages":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001, {400}),
    ("E5 NaN", GENERATE, b'{"inputs":"a","parameters":{"temperature":NaN}}', {422}),
    ("E5 1e999", CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}', {422}),
    ("E5 5000 digits", COMPLETIONS, b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", {422}),
    ("E6 half a pair", GENERATE, b'{"inputs":"\\ud800"}', {400}),
    ("E6 half a pair in a chat", CHAT, b'{"messages":[{"role":"user","content":"\\udfff"}]}', {400, 422}),
    ("E6 no UTF-8", GENERATE, b'{"inputs":"\xff\xfe"}', {400}),
    ("E6 NUL", GENERATE, _native() | {"inputs": "\0\0"}, {200}),
    ("E6 NUL in a chat", CHAT, _said("\0"), {200}),
    ("E6 a mark of byte order", GENERATE, b'\xef\xbb\xbf{"inputs":"a","parameters":{"max_new_tokens":1}}', {200, 400}),
    ("E6 1 MB without a space", GENERATE, _native() | {"inputs": "x" * 1_000_000}, {422}),
    ("E6 only marks", GENERATE, _native(truncate=50) | {"inputs": "\u0301" * 3000}, {200}),
    ("E8 a stop text of 1 MB", GENERATE, _native(stop=["x" * 1_000_000]), {422}),
    ("E8 an empty stop text", CHAT, _chat(stop=["", ""]), {200}),
    ("E8 100 000 stop texts", COMPLETIONS, {"prompt": "a", "stop": ["x"] * 100_000}, {422}),
    ("E9 n", CHAT, _chat(n=2**32 - 1), {422}),
    ("E9 best_of", GENERATE, _native(best_of=2**63, do_sample=True), {422}),
    ("E9 best_of of completions", COMPLETIONS, {"prompt": "a", "best_of": 2**32 - 1}, {422}),
    ("E9 top_n_tokens", GENERATE, _native(top_n_tokens=2**32 - 1), {422}),
    ("E9 logprobs", COMPLETIONS, {"prompt": "a", "logprobs": 2**32 - 1}, {422}),
    ("E9 100 000 biases", CHAT, _chat(logit_bias={str(i): 1 for i in range(100_000)}), {422}),
    ("E9 a bias of nothing", CHAT, _chat(logit_bias={"4294967295": 1, "99999999999999999999": 1}), {422}),
    ("E9 everything banned", CHAT, _chat(logit_bias={str(i): -100 for i in range(1024)}), {200, 424}),
    ("E9 100 000 prompts", COMPLETIONS, {"prompt": ["a"] * 100_000}, {422}),
    ("E9 300 000 token ids", COMPLETIONS, {"prompt": [1] * 300_000}, {422}),
    ("E9 an unknown token id", COMPLETIONS, {"prompt": [4_000_000_000]}, {422}),
    ("E10 a prompt of the payload's size", GENERATE, _native() | {"inputs": "word " * 390_000}, {422}),
    ("E11 nested repeats", GENERATE, _regex("((a{1,999}){1,999}){1,999}"), {200, 422}),
    ("E11 alternatives", GENERATE, _regex("(a|a?)+" * 400), {200, 422}),
    ("E11 look-around", GENERATE, _regex("(?<=a)b"), {422}),
    ("E11 broken", GENERATE, _regex("["), {422}),
    ("E11 nothing matches", GENERATE, _regex("[^\\s\\S]"), {422, 424}),
    ("E12 deep oneOf", GENERATE, _schema(_nested(60)), {200, 422}),
    ("E12 recursive", GENERATE, _schema({"$ref": "#"}), {422}),
    ("E12 recursive through properties", GENERATE, _schema({"properties": {"a": {"$ref": "#"}}}), {200, 422}),
    ("E12 10 000 properties", GENERATE, _schema({"properties": {f"p{i}": {} for i in range(10_000)}}), {200, 422}),
    ("E12 no type", GENERATE, _schema({"type": "nothing", "properties": {}}), {422}),
    ("E12 a pattern", GENERATE, _schema({"properties": {"a": {"type": "string", "pattern": "(a{1,999}){1,999}"}}}),
     {200, 422}),
    ("E14 a template in a message", CHAT, _said("{{ ''.__class__.__mro__ }}{% for i in x %}"), {200}),
    ("E14 a template in a role", CHAT, _said("Hi", role="{{ 7*7 }}"), {200, 422}),
    ("E14 a template of one's own", CHAT, _chat(chat_template="{{ 'a' * 10**9 }}"), {200, 422}),
    ("E14 variables", CHAT, _chat(chat_template_kwargs={"messages": [], "raise_exception": 1}), {200, 422}),
    ("E15 10 000 messages", CHAT, {"messages": [{"role": "user", "content": ""}] * 10_000}, {422}),
    ("E15 10 001 messages", CHAT, {"messages": [{"role": "user", "content": ""}] * 10_001}, {422}),
    ("E15 a role of another kind", CHAT, _said("Hi", role=7), {422}),
    ("E15 parts of another kind", CHAT, _said([{"type": "text"}, {"type": "audio", "audio": 1}]), {422}),
    ("E15 a tool without a name", CHAT, _chat(tools=[{"type": "function", "function": {}}]), {422}),
    ("E15 tools that are no list", CHAT, _chat(tools={"a": 1}), {422}),
    ("E15 5000 tools", CHAT, _chat(tools=[_TOOL] * 5000), {422}),
    ("E15 a tool with a broken schema", CHAT, _chat(tools=[{"type": "function", "function": {
        "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "nothing"}}}}}],
        tool_choice="required"), {422}),
    ("E15 a choice of nothing", CHAT, _chat(tools=[_TOOL], tool_choice={"function": None}), {422}),
    ("E15 a call without a function", CHAT, _said(None, role="assistant", tool_calls=[{"id": "1"}]), {422}),
    ("E17 an adapter by path", GENERATE, _native(adapter_id="../../../etc/passwd"), {422}),
    ("E17 an adapter by address", GENERATE, _native(adapter_id="http://127.0.0.1/x"), {422}),
    ("E17 a model by path", CHAT, _chat(model="../../../etc/passwd"), {200}),
]  # fmt: skip


ROWS = sorted({name.split()[0] for name, *_ in HOSTILE})


@pytest.mark.parametrize("row", ROWS)
def test_hostile_bodies(client: httpx.Client, row: str) -> None:
    for name, path, body, statuses in HOSTILE:
        if name.split()[0] != row:
            continue
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = client.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in statuses, f"{name}: {answer.status_code} {answer.text[:500]}"
        if answer.status_code != 200:
            assert list(answer.json()) == ["error", "error_type"] and len(answer.text) < 1500, name
            assert not any(word in answer.text for word in ("Traceback", "site-packages", ".py")), name


def test_paths_that_lead_elsewhere(client: httpx.Client) -> None:
    for path in ("/v1/models/..%2f..%2fetc%2fpasswd", "/v1/models/%00", "/docs/../../etc/passwd", "/%ff", "/v1/"):
        answer = client.get(path)
        assert answer.status_code == 404 and answer.json()["error_type"] == "not_found", path


def test_no_address_in_a_request_is_ever_asked(client: httpx.Client) -> None:
    """E12, E16: remote references and images."""
    with _Listener() as listener:
        for path, body in (
            (GENERATE, _schema({"$ref": f"{listener.url}/schema.json"})),
            (GENERATE, _schema({"properties": {"a": {"$ref": f"{listener.url}/schema.json"}}})),
            (GENERATE, _native() | {"inputs": f"![]({listener.url}/image.png)"}),
            (CHAT, _said([{"type": "image_url", "image_url": {"url": f"{listener.url}/image.png"}}])),
            (CHAT, _chat(model=listener.url)),
            (CHAT, _chat(tools=[{"type": "function", "function": {
                "name": "f", "parameters": {"$ref": f"{listener.url}/s.json"}}}], tool_choice="required")),
        ):  # fmt: skip
            assert client.post(path, json=body).status_code in (200, 422)
        assert listener.num_connections == 0


class _Listener:
    """Counts who connects."""

    def __enter__(self) -> _Listener:
        self.num_connections = 0
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.settimeout(0.1)
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._is_done = threading.Event()
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()
        return self

    def _accept(self) -> None:
        while not self._is_done.is_set():
            try:
                self._socket.accept()[0].close()
                self.num_connections += 1
            except TimeoutError:
                continue

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._thread.join()
        self._socket.close()


async def test_grammar_bombs_at_once_beside_other_requests(server: RunningServer) -> None:
    """E11: sixteen that explode, each its own; an ordinary request does not wait for them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_LIMIT_S) as client:
        bombs = [
            asyncio.create_task(
                client.post(
                    GENERATE, json=_native(grammar={"type": "regex", "value": f"((a{{1,99{i}}}){{1,999}}){{1,999}}"})
                )
            )
            for i in range(PLACES - 2)
        ]
        await asyncio.sleep(0.1)
        answer = await client.post(GENERATE, json=ORDINARY)
        assert answer.status_code == 200
        for bomb in await asyncio.gather(*bombs):
            assert bomb.status_code in (200, 422, 429), bomb.text


async def test_clients_that_leave_at_any_moment(server: RunningServer) -> None:
    """Each kind of request, cut after a random time, many at once."""
    source = random.Random(5)
    requests = [
        (GENERATE, _native(max_new_tokens=100, ignore_eos=True)),
        ("/generate_stream", _native(max_new_tokens=100, ignore_eos=True)),
        ("/", _native(best_of=2, do_sample=True, max_new_tokens=60)),
        (CHAT, _chat(n=3, max_tokens=60, stream=True, ignore_eos=True)),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 60, "ignore_eos": True}),
        ("/invocations", _chat(max_tokens=60, stream=True)),
        ("/vertex", {"instances": [_native(max_new_tokens=60)] * 3}),
        (GENERATE, _native(grammar={"type": "regex", "value": "(a{1,999}){1,999}"})),
    ]

    async def cut(client: httpx.AsyncClient) -> None:
        path, body = source.choice(requests)
        try:
            async with asyncio.timeout(source.uniform(0.001, 0.15)):
                async with client.stream("POST", path, json=body) as response:
                    async for _ in response.aiter_bytes():
                        assert response.status_code in (200, 422, 429)
        except TimeoutError:
            pass

    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_LIMIT_S, limits=limits) as client:
        for _ in range(20):
            await asyncio.gather(*(cut(client) for _ in range(8)))


async def test_health_answers_while_large_prompts_are_read(server: RunningServer) -> None:
    """E10: tokenising two megabytes happens off the event loop."""
    body = json.dumps(_native() | {"inputs": "Ünï wörd! " * 150_000}, ensure_ascii=False).encode()
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_LIMIT_S) as client:
        large = [
            asyncio.create_task(client.post(GENERATE, content=body, headers={"content-type": "application/json"}))
            for _ in range(2)
        ]
        while not all(task.done() for task in large):
            assert (await client.get("/health")).status_code == 200
        assert {task.result().status_code for task in large} == {422}


def test_random_bytes_on_the_socket(server: RunningServer) -> None:
    source = random.Random(9)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    good = head + b"content-length: 14\r\nconnection: close\r\n\r\n" + b'{"inputs":"x"}'
    for _ in range(150):
        sent = bytearray(good)
        for _ in range(source.randint(1, 6)):
            sent[source.randrange(len(sent))] = source.randrange(256)
        with socket.create_connection(("127.0.0.1", server.port), timeout=ANSWER_LIMIT_S) as connection:
            connection.sendall(bytes(sent))
            connection.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while piece := connection.recv(65536):
                    answer += piece
            except ConnectionError:
                continue
        expected = {b"200", b"400", b"404", b"405", b"408", b"415", b"422", b"431"}
        assert not answer or answer.split(b" ")[1] in expected, (bytes(sent), answer[:200])
