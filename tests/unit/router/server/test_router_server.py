"""The whole router process on a fake scheduler: its ports, and what it starts with."""

from __future__ import annotations

import asyncio
import json
import socket
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from router_fakes import until
from serving import EndingScheduler, get, terminate

from router.config import RouterConfig
from router.errors import StartupError
from router.server import server
from router.server.server import serve
from router.server.sockets import bind_path
from router.server.startup import Started


@pytest.mark.parametrize("given", [("0123abc", "sha-0123"), ("", ""), None])
async def test_an_image_tells_what_it_was_built_from(
    config: RouterConfig,
    scheduler: EndingScheduler,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, str] | None,
) -> None:
    for name, value in zip(("GIT_SHA", "DOCKER_LABEL"), given or (None, None), strict=True):
        monkeypatch.setenv(name, value) if value is not None else monkeypatch.delenv(name, raising=False)
    serving_task = asyncio.ensure_future(serve(config))
    info = json.loads((await get(config.port, "/info")).partition(b"\r\n\r\n")[2])
    assert (info["sha"], info["docker_label"]) == (given if given and any(given) else (None, None))
    terminate()
    assert await asyncio.wait_for(serving_task, 60) == 0


@pytest.mark.parametrize("key", [None, "secret"])
async def test_that_everybody_is_served_is_told_once(
    config: RouterConfig, scheduler: EndingScheduler, caplog: pytest.LogCaptureFixture, key: str | None
) -> None:
    serving_task = asyncio.ensure_future(serve(replace(config, hostname="0.0.0.0", api_key=key)))
    assert b" 200 " in await get(config.port, "/health")
    terminate()
    assert await asyncio.wait_for(serving_task, 60) == 0
    told = [record for record in caplog.records if record.getMessage().startswith("no API key")]
    assert [record.levelname for record in told] == ([] if key else ["WARNING"])


async def test_a_port_in_use_is_found_before_the_model(model: Path, scheduler: EndingScheduler) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=str(port)):
            await serve(RouterConfig(tokenizer_name=str(model), hostname="127.0.0.1", port=port))


async def test_http_on_a_unix_socket_instead_of_the_port(
    config: RouterConfig, scheduler: EndingScheduler, tmp_path: Path
) -> None:
    path = tmp_path / "http.sock"
    with socket.socket(socket.AF_UNIX) as dead:  # of a router that was killed
        dead.bind(str(path))
    serving_task = asyncio.ensure_future(serve(replace(config, uds=path, uds_mode="0640")))
    reader, writer = await connect_to(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert b" 200 " in await reader.read()
    writer.close()
    with pytest.raises(StartupError, match="a process is listening"):
        bind_path(path, 0o600)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", config.port)) != 0
    terminate()
    assert await asyncio.wait_for(serving_task, 60) == 0
    assert not path.exists()


async def connect_to(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    async with asyncio.timeout(60):
        while True:
            try:
                return await asyncio.open_unix_connection(path)
            except OSError:
                await asyncio.sleep(0.01)


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
        serving_task = asyncio.ensure_future(serve(config))
        assert b" 200 " in await get(config.port, "/health")
        await until(lambda: not serving_task.done())
        assert b" 200 " in await get(metrics_port, "/metrics")
        terminate()
        assert await asyncio.wait_for(serving_task, 30) == 0


@pytest.mark.parametrize("which", ["port", "prometheus_port"])
async def test_a_port_that_somebody_took_while_the_model_was_loaded(
    model: Path, free_port: int, scheduler: EndingScheduler, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    """Two sockets may be bound to it, and asyncio's loop is silent when the second one cannot listen."""
    ready = server.connect_replicas
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

        async def load(*arguments: Any, **options: Any) -> Started:
            other.bind(("127.0.0.1", free_port))
            other.listen()
            return await ready(*arguments, **options)

        monkeypatch.setattr(server, "connect_replicas", load)
        ports: dict[str, int] = {"port": 0, which: free_port}
        config = RouterConfig(tokenizer_name=str(model), hostname="127.0.0.1", **ports)  # type: ignore[arg-type]
        with pytest.raises(StartupError, match=f"127.0.0.1:{free_port}: Address already in use"):
            await asyncio.wait_for(serve(config), 20)
    assert scheduler.is_closed
