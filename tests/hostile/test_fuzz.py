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
from collections.abc import Iterator

import httpx
import pytest
from hostile.wrong_bodies import CHAT, COMPLETIONS, GENERATE, HOSTILE, chat, native, said, schema
from support.running_server import RunningServer, running_server

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

BLOCK = 16
TOTAL = 8 * BLOCK
CAPACITY = 4 * TOTAL
PLACES = 12
WITHOUT_MARKS = "POST /infill"
ANSWER_LIMIT_S = 60.0
"""Longer means a hang."""
ORDINARY = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 24, "details": True, "ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(
        "demo", "--max-total-tokens", str(TOTAL), "--max-input-tokens", str(TOTAL - 8), "--max-batch-prefill-tokens",
        str(TOTAL), "--max-batch-total-tokens", str(CAPACITY), "--max-concurrent-requests", str(PLACES),
    ) as running:  # fmt: skip
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=ANSWER_LIMIT_S) as opened:
        yield opened


@pytest.mark.weekly
@pytest.mark.random
@pytest.mark.parametrize("kind", ["positive", "negative"])
def test_random_requests_of_our_own_document(server: RunningServer, kind: str) -> None:
    from hostile.random_requests import GenerationMode, fuzzed, schemathesis  # a second to import, for every process

    mode = GenerationMode(kind)
    schema = schemathesis.openapi.from_url(f"{server.url}/api-doc/openapi.json")
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) > 12
    statuses: dict[str, set[int]] = {}
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and operation.method != "post":
            continue  # nothing to get wrong
        statuses[operation.label] = fuzzed(operation, mode)
    posts = {label: seen for label, seen in statuses.items() if label.startswith("POST")}
    assert len(posts) >= 9
    if mode is GenerationMode.POSITIVE:
        assert posts.pop(WITHOUT_MARKS) == {422}, "the demo model has no marks of gaps"
        assert all(200 in seen for seen in posts.values()), posts
    else:
        # Few cases for each route: all of one may happen to be no JSON at all.
        assert all(seen & {400, 422} for seen in posts.values()), posts
        others = "/v1/"  # where it is 400
        of_422 = [seen for label, seen in posts.items() if not label.removeprefix("POST ").startswith(others)]
        assert sum(422 in seen for seen in of_422) > len(of_422) / 4, posts


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
            (GENERATE, schema({"$ref": f"{listener.url}/schema.json"})),
            (GENERATE, schema({"properties": {"a": {"$ref": f"{listener.url}/schema.json"}}})),
            (GENERATE, native() | {"inputs": f"![]({listener.url}/image.png)"}),
            (CHAT, said([{"type": "image_url", "image_url": {"url": f"{listener.url}/image.png"}}])),
            (CHAT, chat(model=listener.url)),
            (CHAT, chat(tools=[{"type": "function", "function": {
                "name": "f", "parameters": {"$ref": f"{listener.url}/s.json"}}}], tool_choice="required")),
        ):  # fmt: skip
            assert client.post(path, json=body).status_code in (200, 400, 422)
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


@pytest.mark.long
async def test_grammar_bombs_at_once_beside_other_requests(server: RunningServer) -> None:
    """E11: sixteen that explode, each its own; an ordinary request does not wait for them."""
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_LIMIT_S) as client:
        bombs = [
            asyncio.create_task(
                client.post(
                    GENERATE, json=native(grammar={"type": "regex", "value": f"((a{{1,99{i}}}){{1,999}}){{1,999}}"})
                )
            )
            for i in range(PLACES - 2)
        ]
        await asyncio.sleep(0.1)
        answer = await client.post(GENERATE, json=ORDINARY)
        assert answer.status_code == 200
        for bomb in await asyncio.gather(*bombs):
            assert bomb.status_code in (200, 422, 429), bomb.text


@pytest.mark.long
async def test_clients_that_leave_at_any_moment(server: RunningServer) -> None:
    """Each kind of request, cut after a random time, many at once."""
    source = random.Random(5)
    requests = [
        (GENERATE, native(max_new_tokens=100, ignore_eos=True)),
        ("/generate_stream", native(max_new_tokens=100, ignore_eos=True)),
        ("/", native(best_of=2, do_sample=True, max_new_tokens=60)),
        (CHAT, chat(n=3, max_tokens=60, stream=True, ignore_eos=True)),
        (COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 60, "ignore_eos": True}),
        ("/invocations", chat(max_tokens=60, stream=True)),
        ("/vertex", {"instances": [native(max_new_tokens=60)] * 3}),
        (GENERATE, native(grammar={"type": "regex", "value": "(a{1,999}){1,999}"})),
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


@pytest.mark.long
async def test_health_answers_while_large_prompts_are_read(server: RunningServer) -> None:
    """E10: tokenising two megabytes happens off the event loop."""
    body = json.dumps(native() | {"inputs": "Ünï wörd! " * 150_000}, ensure_ascii=False).encode()
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
