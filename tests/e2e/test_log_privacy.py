"""What clients send and get never shows in the log of real processes, and cannot draw on it or flood it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.running_server import RunningServer, running_server

pytestmark = pytest.mark.e2e

KEY = "key-marker-5b1f0c"
MARK = "mark3r"
HOSTILE = ["\x1b[31m", "\u2028", "\r\n2026-01-01T00:00:00.0Z ERROR router: forged", "\x00", "\x9b2J", "\u202e", "\n{}"]
MAX_BYTES_PER_REQUEST = 4096


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("demo", "--api-key", KEY, "--max-total-tokens", "512") as running:
        yield running


def marked(random_: random.Random) -> str:
    return f"{MARK}{random_.choice(HOSTILE)}{MARK}{random_.randrange(10**9)}"


def bodies(random_: random.Random) -> list[tuple[str, Any]]:
    def text() -> str:
        return marked(random_)

    schema = {"type": "object", "properties": {text(): {"const": text()}}, "required": []}
    few = {"max_new_tokens": 8}
    return [
        ("/generate", {"inputs": text(), "parameters": few}),
        ("/generate", {"inputs": text(), "parameters": few | {"stop": [text()], "details": True}}),
        ("/generate", {"inputs": text() * 400}),
        ("/generate", {"inputs": text(), "parameters": few | {"adapter_id": text()}}),
        ("/generate", {"inputs": text(), "parameters": few | {"grammar": {"type": "regex", "value": text() + "("}}}),
        ("/generate", {"inputs": text(), "parameters": few | {"grammar": {"type": "json", "value": schema}}}),
        ("/generate", {"inputs": [text()]}),
        ("/generate", {text(): text()}),
        ("/generate_stream", {"inputs": text(), "parameters": few}),
        ("/", {"inputs": text(), "stream": True, "parameters": few}),
        ("/v1/chat/completions", {"model": text(), "messages": [{"role": "user", "content": text()}], "max_tokens": 8}),
        ("/v1/chat/completions", {"messages": [{"role": text(), "content": text()}], "user": text(), "max_tokens": 8}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text()}], "tools": [{"x": text()}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text()}], "response_format": text()}),
        ("/v1/completions", {"model": text(), "prompt": [text(), text()], "max_tokens": 8, "suffix": text()}),
        ("/v1/completions", {"model": text(), "prompt": text(), "max_tokens": 8, "stop": [text()], "stream": True}),
        ("/tokenize", {"inputs": text()}),
        ("/chat_tokenize", {"messages": [{"role": "user", "content": text()}]}),
        ("/invocations", {"inputs": text(), "parameters": few}),
        ("/vertex", {"instances": [{"inputs": text(), "parameters": few}]}),
    ]


def texts_in(answer: Any) -> Iterator[str]:
    """The generated texts of an answer, wherever they are."""
    if isinstance(answer, dict):
        for name, value in answer.items():
            if name in ("generated_text", "content", "text") and isinstance(value, str):
                yield value
            yield from texts_in(value)
    elif isinstance(answer, list):
        for value in answer:
            yield from texts_in(value)


@pytest.mark.long
def test_fuzzed_requests_leave_no_trace_in_the_log(server: RunningServer) -> None:
    random_ = random.Random(7)
    before, num_requests, outputs, statuses = len(server.log().encode()), 0, set(), set()
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for _ in range(4):
            for path, body in bodies(random_):
                headers = {"authorization": f"Bearer {KEY}", "x-request-id": f"id-{num_requests}", "user-agent": MARK}
                answer = client.post(path, json=body, headers=headers)
                statuses.add(answer.status_code)
                num_requests += 1
                if answer.headers["content-type"] == "application/json" and answer.status_code == 200:
                    outputs |= set(texts_in(answer.json()))
        for path in (f"/{MARK}", f"/v1/models/{MARK}%1b[31m", f"/generate?{MARK}"):
            client.get(path)
            client.post(path, content=f"{MARK}", headers={"authorization": f"Basic {MARK}"})
            num_requests += 2
        for raw in (MARK.encode(), b'{"inputs": "' + MARK.encode() + b"\xff", b"[" * 200 + MARK.encode()):
            headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
            assert client.post("/generate", content=raw, headers=headers).status_code in (400, 422)
            num_requests += 1
    assert {200, 422} <= statuses and any(len(output.strip()) >= 8 for output in outputs)
    ask(server, "the-last-one")
    log = server.log_with("the-last-one")
    assert MARK not in log and KEY not in log
    for output in outputs:
        # Shorter ones are found in anything.
        assert len(output.strip()) < 8 or output not in log
    assert "forged" not in log
    assert not any(character in log for character in "\x1b\x00\x9b\u2028\u202e\r")
    assert (len(log.encode()) - before) / num_requests < MAX_BYTES_PER_REQUEST
    assert "Traceback" not in log, json.dumps(log[-3000:])


def ask(server: RunningServer, request_id: str) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 20}
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": request_id}
    assert httpx.post(server.url + "/v1/chat/completions", json=body, headers=headers, timeout=60).status_code == 200
