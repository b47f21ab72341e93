"""The front's side of the launcher: lines of JSON on a unix socket. `launcher.groups.control` has the other side."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.front.models import Model, Models

logger = logging.getLogger(__name__)

_REPORT_EVERY_S = 0.25
_LINE_BYTES = 16 << 20


class LauncherLostError(Exception):
    """The launcher's socket has closed."""


class Link:
    """Tells the launcher what is used and wanted, and follows what it says; as a scheduler, for the server's end."""

    def __init__(self, path: Path, models: Models) -> None:
        self.failure: BaseException | None = None
        self._path, self._models = path, models
        self._writer: asyncio.StreamWriter | None = None
        self._told: dict[str, tuple[int, int, float]] = {}
        self._report_due: asyncio.TimerHandle | None = None
        self._numbers = itertools.count()
        self._waits: dict[int, asyncio.Future[str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        models.on_use = self._on_use
        models.on_let_go = self._on_let_go

    async def run(self) -> None:
        """Follow the launcher until it is gone or `close`."""
        try:
            reader, self._writer = await asyncio.open_unix_connection(self._path, limit=_LINE_BYTES)
            self._send(listening=True)
            while line := await reader.readline():
                self._handle(json.loads(line))
            if not self._is_closed:
                self.failure = LauncherLostError("the launcher has ended")
        except OSError as error:
            self.failure = error

    async def end_if_unreachable(self) -> None:
        """Do nothing: `run` ends by itself."""

    async def close(self) -> None:
        """End `run`."""
        self._is_closed = True
        if self._writer is not None:
            self._writer.close()

    async def load(self, model: Model) -> str:
        """Have a model loaded, and return why that failed, if it did."""
        return await self._ask(load=model.name)

    async def unload(self, model: Model) -> str:
        """Have a model unloaded."""
        return await self._ask(unload=model.name)

    async def _ask(self, **message: str) -> str:
        number = next(self._numbers)
        self._waits[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(**message, number=number)
            return await self._waits[number]
        finally:
            del self._waits[number]

    def _handle(self, message: Mapping[str, Any]) -> None:
        match message:
            case {"models": dict() as told, "is_well": bool(is_well)}:
                for model in self._models.update(told, is_well):
                    self._told.pop(model.name, None)
                    task = asyncio.ensure_future(self._read_cards(model))
                    self._tasks.add(task)
                    task.add_done_callback(self._tasks.discard)
            case {"release": str(name), "may_wait": bool(may_wait)}:
                self._release(self._models.by_name[name], may_wait)
            case {"done": int(number), "error": str(error)}:
                wait = self._waits.get(number)
                if wait is not None and not wait.done():
                    wait.set_result(error)

    def _release(self, model: Model, may_wait: bool) -> None:
        if may_wait or not (model.num_active or model.num_waiting):
            self._models.close(model)
        else:
            self._report()
            self._send(kept=model.name)

    def _on_let_go(self, model: Model) -> None:
        self._report()
        self._send(released=model.name)

    async def _read_cards(self, model: Model) -> None:
        """Ask a router that has been started what it lists: its limits, and its adapters."""
        if model.upstream is None:
            return
        try:
            answer = await model.upstream.request("GET", b"/v1/models")
            body = json.loads(await answer.body())
            answer.close()
            self._models.set_cards(model, [card for card in body["data"] if isinstance(card, dict)])
        except Exception as error:
            logger.warning("%s does not list its names: %s", model.name, error)

    def _on_use(self, is_urgent: bool) -> None:
        if is_urgent:
            self._report()
        elif self._report_due is None:
            self._report_due = asyncio.get_running_loop().call_later(_REPORT_EVERY_S, self._report)

    def _report(self) -> None:
        """Say which models have other numbers of requests than was last said."""
        if self._report_due is not None:
            self._report_due.cancel()
            self._report_due = None
        now, usage = time.monotonic(), {}
        for name, model in self._models.by_name.items():
            numbers = model.num_active, model.num_waiting
            if self._told.get(name) != (*numbers, model.used_at):
                self._told[name] = (*numbers, model.used_at)
                usage[name] = (*numbers, 0.0 if model.num_active else now - model.used_at)
        if usage:
            self._send(usage=usage)

    def _send(self, **message: Any) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(json.dumps(message).encode() + b"\n")
