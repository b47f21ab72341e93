"""Signals, drain and exit status of the whole router process, on a fake scheduler."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from router_fakes import says, until
from serving import EndingScheduler, ask, connect, drains, get, open_stream, post, terminate

from router.config import RouterConfig
from router.generation.validation import Validator
from router.server import server, stop
from router.server.server import serve
from router.server.startup import Started
from router.shards.interface import ShardError, StalledError
from wire.exit_status import STALLED

ENDS_S = 30.0
"""Half of what `config` allows requests in the drain."""


async def test_a_signal_lets_running_requests_finish(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serve(config))
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
    assert await asyncio.wait_for(serving_task, ENDS_S) == 0
    assert scheduler.is_closed
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", config.port)


async def test_an_idle_server_ends_soon(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serve(config))
    reader, writer = await connect(config.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
    await reader.readuntil(b"\r\n\r\n")
    terminate()
    assert await asyncio.wait_for(serving_task, ENDS_S) == 0, "an idle connection does not keep it"
    writer.close()


async def test_what_is_running_is_told_while_it_drains(
    config: RouterConfig, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stop, "_REPORT_EVERY_S", 0.1)
    caplog.set_level(logging.INFO)
    serving_task = asyncio.ensure_future(serve(config))
    async with open_stream(config.port) as reader, open_stream(config.port):
        terminate()
        await until(lambda: "Still running: 2 requests" in caplog.text)
        first, second = scheduler.open
        first.interrupt(says("end")[-1])
        await until(lambda: "Still running: 1 request" in caplog.text)
        second.interrupt(says("end")[-1])
        await reader.read()
    assert await asyncio.wait_for(serving_task, ENDS_S) == 0


async def test_the_status_says_that_the_shards_are_stuck(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serve(config))
    await get(config.port, "/health")
    scheduler.failure = StalledError("no step finished for 2 s", detail="no step")
    scheduler.ended.set()
    assert await asyncio.wait_for(serving_task, ENDS_S) == STALLED


@pytest.mark.parametrize(
    ("path", "drained"),
    [("/generate", False), ("/generate_stream", False), ("/v1/completions", False), ("/generate", True)],
)
async def test_requests_that_are_being_prepared_are_answered_when_the_scheduler_ends(
    config: RouterConfig, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch, path: str, drained: bool
) -> None:
    """Images may take many seconds, which no client of a server without shards has to wait."""
    entered = asyncio.Event()

    async def never(self: Validator, request: object) -> None:
        entered.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(Validator, "validate", never)
    monkeypatch.setattr(stop, "FLUSH_TIMEOUT_S", 60)
    serving_task = asyncio.ensure_future(serve(config))
    asked = asyncio.ensure_future(post(config.port, path))
    await entered.wait()
    if drained:  # as the launcher asks for when it has lost a node
        terminate()
        await drains(config.port)
    scheduler.failure = RuntimeError("shard lost")
    scheduler.ended.set()
    answer = await asyncio.wait_for(asked, ENDS_S)
    assert answer.startswith(b"HTTP/1.1 503 ") and b'"healthcheck"' in answer
    assert await asyncio.wait_for(serving_task, ENDS_S) == 1


async def test_the_last_word_is_why_the_scheduler_ended(
    config: RouterConfig, scheduler: EndingScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    serving_task = asyncio.ensure_future(serve(config))
    async with open_stream(config.port):  # whose answer cannot be ended in time, which is logged as an error
        scheduler.failure = StalledError("no step finished for 2 s", detail="no step")
        scheduler.ended.set()
        assert await asyncio.wait_for(serving_task, ENDS_S) == STALLED
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "Exception in ASGI application\n" in errors
    assert errors[-1] == "the scheduler has stopped: no step finished for 2 s"


async def test_requests_that_outlast_the_deadline_are_told(
    model: Path, free_port: int, scheduler: EndingScheduler
) -> None:
    config = RouterConfig(
        tokenizer_name=str(model), hostname="127.0.0.1", port=free_port, graceful_termination_timeout=0
    )
    serving_task = asyncio.ensure_future(serve(config))
    async with open_stream(config.port) as reader:
        terminate()
        assert b'"error_type":"healthcheck"' in await reader.read()
    assert await asyncio.wait_for(serving_task, ENDS_S) == 0


async def test_a_second_signal_ends_at_once(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serve(config))
    async with open_stream(config.port):
        terminate()
        await drains(config.port)
        await asyncio.sleep(stop._REPEATED_SIGNAL_S + 0.1)
        terminate()
    assert await asyncio.wait_for(serving_task, ENDS_S) == 0


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_from_two_sides_is_one(
    config: RouterConfig, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """A service manager signals every process, and the launcher passes on what it has got."""
    monkeypatch.setattr(stop, "_REPEATED_SIGNAL_S", 60.0)
    serving_task = asyncio.ensure_future(serve(config))
    async with open_stream(config.port) as reader:
        os.kill(os.getpid(), first)
        await asyncio.sleep(0.02)
        terminate()
        await asyncio.sleep(0.1)
        scheduler.open[0].interrupt(says("end")[-1])
        assert b'"generated_text":"end"' in await reader.read()
    assert await asyncio.wait_for(serving_task, ENDS_S) == 0


@pytest.mark.parametrize(
    ("failure", "status"), [(StalledError("no step", detail="no step"), STALLED), (RuntimeError("shard lost"), 1)]
)
async def test_shards_that_fail_in_the_drain_make_it_a_failure(
    config: RouterConfig, scheduler: EndingScheduler, failure: Exception, status: int
) -> None:
    serving_task = asyncio.ensure_future(serve(config))
    async with open_stream(config.port) as reader:
        terminate()
        await drains(config.port)
        scheduler.failure = failure
        await scheduler.close()
        assert b'"error"' in await reader.read()
    assert await asyncio.wait_for(serving_task, ENDS_S) == status


async def test_a_drain_looks_whether_the_shards_are_still_there(
    config: RouterConfig, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that waits for a frozen node does not notice it, and the launcher kills a router that is not done soon."""
    monkeypatch.setattr(stop, "_LOOK_EVERY_S", 0.01)
    serving_task = asyncio.ensure_future(serve(config))
    async with open_stream(config.port) as reader:
        terminate()
        await drains(config.port)
        await asyncio.sleep(0.05)
        assert not serving_task.done()
        scheduler.unreachable = ShardError("gone", fatal=True, unreachable=True)
        assert b'"error"' in await reader.read()
    assert await asyncio.wait_for(serving_task, ENDS_S) == 1


async def test_the_process_fails_with_its_scheduler(config: RouterConfig, scheduler: EndingScheduler) -> None:
    serving_task = asyncio.ensure_future(serve(config))
    await get(config.port, "/health")
    scheduler.failure = RuntimeError("shard lost")
    scheduler.ended.set()
    assert await asyncio.wait_for(serving_task, ENDS_S) == 1


async def test_a_signal_while_starting(config: RouterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: Any, **__: Any) -> Started:
        terminate()
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(server, "connect_replicas", connect)
    assert await asyncio.wait_for(serve(config), ENDS_S) == 0
