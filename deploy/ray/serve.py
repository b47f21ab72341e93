"""Servers of one model behind Ray Serve: each replica runs a launcher and passes requests and streams on to it.

    pip install "ray[serve]"
    cd deploy/ray
    serve run --working-dir . --app-dir . serve:build model=MODEL replicas=2 gpus=1

Without `gpus` a replica takes `cpus` (1). `launcher` is the command of Tercet, where it is not on the PATH.
"""

from __future__ import annotations

import asyncio
import ctypes
import shlex
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

START_LIMIT_S = 1800
HOP_BY_HOP = {"connection", "content-length", "host", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}


@serve.deployment(health_check_period_s=5, health_check_timeout_s=10, graceful_shutdown_timeout_s=120)
class Server:
    """One launcher on a free port of the loopback address."""

    async def __init__(self, model: str, launcher: str = "launcher", options: str = "") -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        words = ["--model-id", model, "--hostname", "127.0.0.1", "--port", str(port), *shlex.split(options)]
        prctl = ctypes.CDLL(None).prctl
        # 1 is PR_SET_PDEATHSIG: the launcher, and with it its children, ends when this replica is killed.
        self._launcher = subprocess.Popen(  # noqa: ASYNC220
            [*shlex.split(launcher), *words], preexec_fn=lambda: prctl(1, signal.SIGKILL, 0, 0, 0)
        )
        self._client = aiohttp.ClientSession(
            f"http://127.0.0.1:{port}", timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
        )
        async with asyncio.timeout(START_LIMIT_S):
            while not await self._is_healthy():  # noqa: ASYNC110
                await asyncio.sleep(0.2)

    async def _is_healthy(self) -> bool:
        """Raises RuntimeError once the launcher has ended."""
        if self._launcher.poll() is not None:
            raise RuntimeError(f"the launcher has ended with status {self._launcher.returncode}, see its log")
        try:
            async with self._client.get("/health") as answer:
                return answer.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def check_health(self) -> None:
        """Ray Serve replaces the replica if this fails."""
        if not await self._is_healthy():
            raise RuntimeError("GET /health of the launcher is not answered with 200")

    async def __call__(self, request: Request) -> StreamingResponse:
        sent = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        answer = await self._client.request(request.method, path, headers=sent, data=await request.body())
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
        return StreamingResponse(_parts(answer), answer.status, kept)

    async def __del__(self) -> None:
        """Running requests are over: Ray Serve has waited for them."""
        self._launcher.terminate()
        await asyncio.to_thread(self._launcher.wait)
        await self._client.close()


async def _parts(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """As they come; a client that leaves closes the launcher's answer."""
    async with answer:
        async for part in answer.content.iter_any():
            yield part


def build(arguments: dict[str, Any]) -> serve.Application:
    """Of `serve run`: model, launcher, options, replicas, cpus, gpus."""
    rest = {name: value for name, value in arguments.items() if name in ("model", "launcher", "options")}
    resources = {"num_cpus": float(arguments.get("cpus", 1)), "num_gpus": float(arguments.get("gpus", 0))}
    replicas = int(arguments.get("replicas", 1))
    return Server.options(num_replicas=replicas, ray_actor_options=resources).bind(**rest)  # type: ignore[attr-defined]
