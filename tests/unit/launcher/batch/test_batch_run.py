"""`launcher batch` against scripted servers: what is sent again, what counts as failed, and its exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.scripted_http import ScriptedServer

from launcher.batch import run
from launcher.batch.command import run_batch
from launcher.batch.config import BatchConfig
from launcher.batch.run import Batch, Sending, UnreachableError
from wire.batch_lines import Answers, read_requests

Build = Callable[..., bytes]


class Files:
    def __init__(self, folder: Path) -> None:
        self.requests, self.answers = folder / "in", folder / "out"

    def write(self, *bodies: dict[str, Any]) -> None:
        rows = ({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
                for number, body in enumerate(bodies))  # fmt: skip
        self.requests.write_text("".join(json.dumps(row) + "\n" for row in rows))

    async def run(self, url: str, retries: int = 2) -> Batch:
        lines = read_requests(self.requests)
        answers = Answers.open(self.answers, {line.custom_id for line in lines})
        sending = Sending(url=url, headers={"x-name": "value"}, concurrency=1, retries=retries, timeout_s=30)
        left = iter([line for line in lines if line.custom_id not in answers.done])
        with self.requests.open("rb") as requests:
            batch = Batch(requests.fileno(), left, answers, sending)
            try:
                await batch.run()
            finally:
                answers.close()
        return batch

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.answers.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture(autouse=True)
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What would have been waited."""
    waited: list[float] = []
    pause_s = run._pause_s

    def pause(*arguments: Any) -> float:
        waited.append(pause_s(*arguments))
        return 0.0

    monkeypatch.setattr(run, "_pause_s", pause)
    return waited


def refused(status: str, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return f"HTTP/1.1 {status}\r\n{lines}content-length: 2\r\n\r\n[]".encode()


async def test_answers_are_lines_with_status_and_body(server: ScriptedServer, answer: Build, files: Files) -> None:
    files.write({"prompt": "x", "priority": 2}, {"prompt": "y"})
    server.answers = [answer(b"{}"), answer(b'{"id":1}').replace(b"\r\n\r\n", b"\r\nX-Request-Id: abc\r\n\r\n", 1),
                      answer(b"no JSON", "400 Bad")]  # fmt: skip
    batch = await files.run(server.url)
    assert (batch.num_answered, batch.num_failed) == (1, 1)
    first, second = files.rows
    assert first.pop("id") != second.pop("id")
    response = {"status_code": 200, "request_id": "abc", "body": {"id": 1}}
    assert first == {"custom_id": "0", "response": response, "error": None}
    assert second["response"] == {"status_code": 400, "request_id": "", "body": "no JSON"}
    assert b"x-name: value\r\n" in server.requests[1] and server.requests[1].endswith(b'{"prompt":"x","priority":2}')
    assert b"POST /v1/completions HTTP/1.1" in server.requests[1]


async def test_what_the_server_fails_is_sent_again_and_limits_are_waited_for(
    server: ScriptedServer, answer: Build, files: Files, pauses: list[float]
) -> None:
    files.write({"prompt": "x"})
    limited = refused("429 Too Many Requests", "Retry-After: 7")
    server.answers = [answer(b"{}"), refused("500 No"), limited, limited, refused("503 No", "retry-after: 2"), limited,
                      answer(b"[]")]  # fmt: skip
    batch = await files.run(server.url)
    assert (batch.num_answered, pauses) == (1, [1.0, 7.0, 7.0, 2.0, 7.0])
    assert files.rows[0]["response"]["status_code"] == 200


async def test_a_server_that_goes_on_failing_is_an_answer(server: ScriptedServer, answer: Build, files: Files) -> None:
    files.write({"prompt": "x"}, {"prompt": "y"})
    server.answers = [answer(b"{}"), *[refused("500 No")] * 3, *[b"SMTP ready\r\n"] * 3]
    batch = await files.run(server.url)
    assert batch.num_failed == 2
    first, second = files.rows
    assert first["response"]["status_code"] == 500 and first["error"] is None
    assert second["response"] is None and second["error"]["code"] == "no_answer"
    server.answers = [answer(b"{}")] * 3
    batch = await files.run(server.url)
    assert batch.num_answered == 2 and len(files.rows) == 2


async def test_a_server_that_is_gone_ends_the_batch(server: ScriptedServer, answer: Build, files: Files) -> None:
    files.write({"prompt": "x"})
    with pytest.raises(UnreachableError, match="no server answers at http://127"):
        await files.run("http://127.0.0.1:9")
    assert files.rows == []


async def test_what_the_server_takes(server: ScriptedServer, answer: Build, files: Files) -> None:
    for said, number in (
        (b'{"max_concurrent_requests":3}', 3),
        (b"{}", 16),
        (b'{"max_concurrent_requests":9999}', 512),
    ):
        server.answers = [answer(said)]
        sending = Sending(url=server.url, headers={}, concurrency=None, retries=0, timeout_s=30)
        assert await Batch(0, iter([]), Answers(0, frozenset()), sending)._concurrency() == number


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "give --url"),
        ({"url": "http://x", "model_id": "demo"}, "give --url"),
        ({"url": "http://x", "server_options": ["--port", "1"]}, "options after -- are for --model-id"),
        ({"url": "ftp://x"}, "--url ftp://x is not an http:// or https:// URL"),
        ({"url": "http://x", "answers": Path("in")}, "is the file of the requests"),
    ],
)
def test_mistakes_send_nothing(
    files: Files, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: Any, says: str
) -> None:
    monkeypatch.chdir(files.requests.parent)
    files.write({"prompt": "x"})
    named = {"requests": files.requests, "answers": files.answers} | options
    assert run_batch(BatchConfig(**named), {}) == 2
    assert says in capsys.readouterr().err and not files.answers.exists()
