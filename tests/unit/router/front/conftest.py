"""The front on a launcher and models that tests play, asked over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.api.errors import ErrorAnswers
from router.front.app import Front, create_app
from router.front.config import FrontConfig
from router.front.link import Link
from router.front.metrics import FrontMetrics
from router.front.models import Models
from router.front.routes import OwnRoutes
from router.keys.accounts import Accounts
from wire.keys import Key

Handler = Callable[[str, bytes, asyncio.StreamWriter], Awaitable[None]]


class Upstreams:
    """Models' routers on unix sockets; each writes what a test says, and remembers what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[tuple[str, str, dict[str, str], bytes]] = []
        self.answers: dict[str, bytes] = {}
        """Model → everything that it writes; by default JSON with its name."""
        self.refusing: set[str] = set()
        """Models that answer before they read a body, and read none."""
        self.hold: dict[str, asyncio.Event] = {}
        self._servers: dict[str, asyncio.Server] = {}

    async def start(self, name: str) -> str:
        path = self.folder / f"{name}.sock"

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await self._serve(name, reader, writer)
            except (asyncio.IncompleteReadError, ConnectionError):
                pass
            finally:
                writer.close()

        self._servers[name] = await asyncio.start_unix_server(serve, path)
        return str(path)

    async def stop(self, name: str) -> None:
        self._servers.pop(name).close()
        (self.folder / f"{name}.sock").unlink(missing_ok=True)  # since Python 3.13 `close` does it

    async def _serve(self, name: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").splitlines()
            headers = {line.partition(": ")[0]: line.partition(": ")[2] for line in head[1:] if line}
            if name in self.refusing and head[0].startswith("POST"):
                writer.write(self.answers[name])
                await asyncio.sleep(3600)
            body = await reader.readexactly(int(headers.get("content-length", 0)))
            while headers.get("transfer-encoding") == "chunked":
                size = int(await reader.readline(), 16)
                body += (await reader.readexactly(size + 2))[:-2]
                if not size:
                    break
            self.asked.append((name, head[0], headers, body))
            if " /v1/models " in head[0]:
                answer = {"data": [{"id": name, "max_model_len": 7}, {"id": f"{name}-lora", "parent": name}]}
                writer.write(_json(answer))
                continue
            if name in self.hold:
                await self.hold[name].wait()
            if name in self.answers:
                writer.write(self.answers[name])
                await writer.drain()
                return
            writer.write(_json({"model": name}))


def _json(value: Any) -> bytes:
    body = json.dumps(value).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-of: model\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body), body
    )  # fmt: skip


class Launcher:
    """The other side of the control socket."""

    def __init__(self, upstreams: Upstreams) -> None:
        self.upstreams = upstreams
        self.models: dict[str, dict[str, Any]] = {}
        self.said: list[dict[str, Any]] = []
        self.is_well = True
        self.ended = asyncio.Event()
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        while line := await reader.readline():
            self.said.append(json.loads(line))
        writer.close()
        self.ended.set()

    def add(self, name: str, **facts: Any) -> None:
        self.models[name] = {
            "aliases": [], "adapters": [], "task": "generate", "preload": False, "socket": "", "state": "unloaded",
            "since": 0.0, "error": "", "retry_at": 0.0, "num_loaded": 0, "num_failed": 0, "took_s": 0.0, **facts,
        }  # fmt: skip

    async def load(self, name: str) -> None:
        path = await self.upstreams.start(name)
        self.models[name] |= {"state": "loaded", "socket": path, "num_loaded": 1, "took_s": 2.0}
        await self.tell()

    async def tell(self) -> None:
        await self.send(models=self.models, is_well=self.is_well)

    async def send(self, **message: Any) -> None:
        assert self._writer is not None
        self._writer.write(json.dumps(message).encode() + b"\n")
        await self._writer.drain()
        await asyncio.sleep(0.02)

    async def until(self, key: str) -> Any:
        """What the front says under that key, now or soon."""
        async with asyncio.timeout(20):
            while True:
                for message in self.said:
                    if key in message:
                        self.said.remove(message)
                        return message[key]
                await asyncio.sleep(0.005)


class Served:
    def __init__(self, client: httpx.AsyncClient, launcher: Launcher, upstreams: Upstreams, models: Models) -> None:
        self.client, self.launcher, self.upstreams, self.models = client, launcher, upstreams, models


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve_front(tmp_path: Path) -> AsyncIterator[Serve]:
    closing: list[Callable[[], Awaitable[None]]] = []

    async def serve(*, keys: list[Key] | None = None, **options: Any) -> Served:
        upstreams = Upstreams(tmp_path)
        launcher = Launcher(upstreams)
        control = tmp_path / "control"
        server = await asyncio.start_unix_server(launcher.serve, control)
        config = FrontConfig(control=control, **options)
        metrics = FrontMetrics()
        models = Models(
            metrics,
            start_timeout_s=config.model_start_timeout,
            max_waiting=config.max_waiting_requests,
            autoload=not config.no_autoload,
        )
        link, errors = Link(control, models), ErrorAnswers("auto", metrics)
        front = Front(config, models, OwnRoutes(models, link, metrics, playground=True), errors)
        accounts = None if keys is None else Accounts(keys, metrics, part="front")
        app = create_app(front, models, errors, api_key=config.api_key, accounts=accounts, allow_origins=())
        running = asyncio.create_task(link.run())

        async def close() -> None:
            await client.aclose()
            for name in [*upstreams._servers]:
                await upstreams.stop(name)
            for model in models.by_name.values():
                if model.upstream is not None:
                    model.upstream.close()
            await link.close()
            await running
            await launcher.ended.wait()
            server.close()
            await asyncio.sleep(0.01)  # for the transports to close

        client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://front", timeout=60)
        closing.append(close)
        await launcher.until("listening")
        return Served(client, launcher, upstreams, models)

    yield serve
    for close in closing:
        await close()
