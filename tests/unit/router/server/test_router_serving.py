"""Start order, signals, drain and exit status of the whole process, on a fake scheduler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from router_fakes import INFO, LIMITS, FakeScheduler, says, until
from tokenizers import Tokenizer

from router.config import RouterConfig
from router.errors import StartupError, UnhealthyError
from router.events import Event, Failed, Token, TokenGenerated
from router.server import server as serving
from router.server.startup import Started
from router.shards.interface import StalledError
from wire.exit_status import STALLED

TOKENS: list[Event | None] = [TokenGenerated(Token(1, "a", -1.0))] * 2


class Shards:
    closed = False

    async def close(self) -> None:
        self.closed = True


class EndingScheduler(FakeScheduler):
    """A scheduler with an end: entries that wait get `Failed` when it closes."""

    def __init__(self) -> None:
        super().__init__(lambda request: [*TOKENS, None])
        self.ended = asyncio.Event()
        self.is_closed = False

    async def run(self) -> None:
        await self.ended.wait()

    async def close(self) -> None:
        self.is_closed = True
        for entry in self.open:
            entry.interrupt(Failed(UnhealthyError()))
        self.ended.set()


@pytest.fixture
def model(tmp_path: Path, tokenizer: Tokenizer) -> Path:
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return tmp_path


@pytest.fixture
def config(model: Path, free_port: int) -> RouterConfig:
    return RouterConfig(tokenizer_name=str(model), hostname="127.0.0.1", port=free_port, graceful_termination_timeout=5)


@pytest.fixture
def free_port() -> Iterator[int]:
    """A port that was free a moment ago and is not given out again meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
async def scheduler(monkeypatch: pytest.MonkeyPatch) -> EndingScheduler:
    made = EndingScheduler()

    async def connect(*_: Any, **__: Any) -> Started:
        return Started(info=INFO, limits=LIMITS, scheduler=made, shards=Shards())  # type: ignore[arg-type]

    monkeypatch.setattr(serving, "connect_and_warm_up", connect)
    return made


async def connect(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(10):
        while True:
            try:
                return await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.01)


async def get(port: int, path: str) -> bytes:
    reader, writer = await connect(port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def ask(port: int, path: str) -> bytes:
    """On a connection that the client would keep."""
    reader, writer = await connect(port)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    return answer


async def post(port: int) -> bytes:
    reader, writer = await connect(port)
    head = "POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 14\r\n\r\n"
    writer.write(head.encode() + b'{"inputs":"x"}')
    answer = await reader.read()
    writer.close()
    return answer


@contextlib.asynccontextmanager
async def open_stream(port: int) -> AsyncIterator[asyncio.StreamReader]:
    """A stream of which two tokens have come."""
    reader, writer = await connect(port)
    raw = b'{"inputs":"x"}'
    head = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    writer.write(b"POST /generate_stream HTTP/1.1\r\n" + head.encode() + raw)
    await reader.readuntil(b'"index":2')
    yield reader
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def drains(port: int) -> None:
    """Returns once it does. Each question comes on a connection of its own."""
    while b" 503 " not in await get(port, "/health"):
        pass


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_a_signal_lets_running_requests_finish(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serving.serve(config))
    assert b" 200 " in await get(config.port, "/health")
    late = await connect(config.port)
    async with open_stream(config.port) as reader:
        terminate()
        await asyncio.sleep(0.3)
        assert not serving_task.done()
        late_reader, late_writer = late
        late_writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        for answer in (await late_reader.read(), await ask(config.port, "/health"), await post(config.port)):
            assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nconnection: close\r\n" in answer
        late_writer.close()
        scheduler.open[0].interrupt(says("end")[-1])
        assert b'"generated_text":"end"' in await reader.read()
    assert await asyncio.wait_for(serving_task, 5) == 0
    assert scheduler.is_closed
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", config.port)


async def test_an_idle_server_ends_soon(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serving.serve(config))
    reader, writer = await connect(config.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    terminate()
    assert await asyncio.wait_for(serving_task, 4) == 0, "an idle connection does not keep it"
    writer.close()


async def test_what_is_running_is_told_while_it_drains(
    config: RouterConfig, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "_REPORT_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)
    serving_task = asyncio.ensure_future(serving.serve(config))
    async with open_stream(config.port) as reader, open_stream(config.port):
        terminate()
        await until(lambda: "2 requests are still running" in caplog.text)
        first, second = scheduler.open
        first.interrupt(says("end")[-1])
        await until(lambda: "1 requests are still running" in caplog.text)
        second.interrupt(says("end")[-1])
        await reader.read()
    assert await asyncio.wait_for(serving_task, 5) == 0


async def test_the_status_says_that_the_shards_are_stuck(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serving.serve(config))
    await get(config.port, "/health")
    scheduler.failure = StalledError("no step finished for 2 s", detail="no step")
    scheduler.ended.set()
    assert await asyncio.wait_for(serving_task, 5) == STALLED


@pytest.mark.parametrize("given", [("0123abc", "sha-0123"), ("", ""), None])
async def test_an_image_tells_what_it_was_built_from(
    config: RouterConfig,
    scheduler: EndingScheduler,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, str] | None,
) -> None:
    for name, value in zip(("GIT_SHA", "DOCKER_LABEL"), given or (None, None), strict=True):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    serving_task = asyncio.ensure_future(serving.serve(config))
    info = json.loads((await get(config.port, "/info")).partition(b"\r\n\r\n")[2])
    assert (info["sha"], info["docker_label"]) == (given if given and any(given) else (None, None))
    terminate()
    assert await asyncio.wait_for(serving_task, 60) == 0


async def test_requests_that_outlast_the_deadline_are_told(
    model: Path, free_port: int, scheduler: EndingScheduler
) -> None:
    config = RouterConfig(
        tokenizer_name=str(model), hostname="127.0.0.1", port=free_port, graceful_termination_timeout=0
    )
    serving_task = asyncio.ensure_future(serving.serve(config))
    async with open_stream(config.port) as reader:
        terminate()
        assert b'"error_type":"healthcheck"' in await reader.read()
    assert await asyncio.wait_for(serving_task, 5) == 0


async def test_a_second_signal_ends_at_once(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serving.serve(config))
    async with open_stream(config.port):
        terminate()
        await drains(config.port)
        await asyncio.sleep(serving._ECHO_S + 0.1)
        terminate()
    assert await asyncio.wait_for(serving_task, 2) == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_from_two_sides_is_one(
    config: RouterConfig, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A service manager signals every process, and the launcher passes on what it has got."""
    monkeypatch.setattr(serving, "_ECHO_S", 60.0)
    serving_task = asyncio.ensure_future(serving.serve(config))
    async with open_stream(config.port) as reader:
        os.kill(os.getpid(), first)
        await asyncio.sleep(0.02)
        terminate()
        await asyncio.sleep(0.1)
        scheduler.open[0].interrupt(says("end")[-1])
        assert b'"generated_text":"end"' in await reader.read()
    assert await asyncio.wait_for(serving_task, 5) == 0


@pytest.mark.parametrize(
    ("failure", "status"), [(StalledError("no step", detail="no step"), STALLED), (RuntimeError("shard lost"), 1)]
)
async def test_shards_that_fail_in_the_drain_make_it_a_failure(
    config: RouterConfig, scheduler: EndingScheduler, failure: Exception, status: int
) -> None:
    serving_task = asyncio.ensure_future(serving.serve(config))
    async with open_stream(config.port) as reader:
        terminate()
        await drains(config.port)
        scheduler.failure = failure
        await scheduler.close()
        assert b'"error"' in await reader.read()
    assert await asyncio.wait_for(serving_task, 5) == status


async def test_the_process_fails_with_its_scheduler(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serving.serve(config))
    await get(config.port, "/health")
    scheduler.failure = RuntimeError("shard lost")
    scheduler.ended.set()
    assert await asyncio.wait_for(serving_task, 5) == 1


async def test_a_signal_while_starting(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: Any, **__: Any) -> Started:
        terminate()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(serving, "connect_and_warm_up", connect)
    assert await asyncio.wait_for(serving.serve(config), 5) == 0


async def test_a_port_in_use_is_found_before_the_model(model: Path, scheduler: EndingScheduler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=str(port)):
            await serving.serve(RouterConfig(tokenizer_name=str(model), hostname="127.0.0.1", port=port))


async def test_the_metrics_port_is_opened_when_asked_for(
    model: Path, free_port: int, scheduler: EndingScheduler
) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        metrics_port = holder.getsockname()[1]
        config = RouterConfig(
            tokenizer_name=str(model), hostname="127.0.0.1", port=free_port, prometheus_port=metrics_port
        )
        serving_task = asyncio.ensure_future(serving.serve(config))
        assert b" 200 " in await get(config.port, "/health")
        await until(lambda: not serving_task.done())
        assert b" 200 " in await get(metrics_port, "/metrics")
        terminate()
        assert await asyncio.wait_for(serving_task, 5) == 0


@pytest.mark.parametrize("which", ["port", "prometheus_port"])
async def test_a_port_that_somebody_took_while_the_model_was_loaded(
    model: Path, free_port: int, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Two sockets may be bound to it, and asyncio's loop is silent when the second one cannot listen."""
    ready = serving.connect_and_warm_up
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        async def load(*arguments: Any, **options: Any) -> Started:
            other.bind(("127.0.0.1", free_port))
            other.listen()
            return await ready(*arguments, **options)

        monkeypatch.setattr(serving, "connect_and_warm_up", load)
        ports: dict[str, int] = {"port": 0, which: free_port}
        config = RouterConfig(tokenizer_name=str(model), hostname="127.0.0.1", **ports)  # type: ignore[arg-type]
        with pytest.raises(StartupError, match=f"127.0.0.1:{free_port}: Address already in use"):
            await asyncio.wait_for(serving.serve(config), 20)
    assert scheduler.is_closed


def test_a_hostname_that_is_no_address(caplog: pytest.LogCaptureFixture) -> None:
    with serving.bind("example.invalid", 0) as listener:
        assert listener.getsockname()[0] == "0.0.0.0"
    assert "example.invalid" in caplog.text
    with serving.bind("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"
