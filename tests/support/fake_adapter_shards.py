"""Shards that load adapters, as the router's registry sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from router.lora.registry import AdapterLost, AdapterRefused, AdapterSize


class FakeAdapterShards:
    """Keeps what a rank would, and fails where the registry breaks a promise. sizes: by path, else 1 byte."""

    def __init__(
        self, sizes: dict[str, int] | None = None, *, wait: Callable[[], Awaitable[Any]] | None = None
    ) -> None:
        self.sizes = sizes or {}
        self.loaded: dict[int, str] = {}
        self.ever: set[int] = set()
        self.refused: set[str] = set()
        self.is_down = False
        self.most_bytes = 0
        self._wait = wait or (lambda: asyncio.sleep(0))

    async def check_adapter(self, name: str, path: str) -> AdapterSize:
        await self._wait()
        self._fail(path)
        return AdapterSize(self.sizes.get(path, 1), 8)

    async def load_adapter(self, load_id: int, name: str, path: str) -> AdapterSize:
        assert load_id not in self.ever, "a load id is used again"
        self.ever.add(load_id)
        await self._wait()
        self._fail(path)
        self.loaded[load_id] = path
        self.most_bytes = max(self.most_bytes, sum(self.sizes.get(p, 1) for p in self.loaded.values()))
        return AdapterSize(self.sizes.get(path, 1), 8)

    async def drop_adapter(self, load_id: int) -> None:
        assert self.loaded.pop(load_id), "dropped twice"
        await self._wait()

    def _fail(self, path: str) -> None:
        if path in self.refused:
            raise AdapterRefused(f"LoRA adapter `{path}`: it is damaged")
        if self.is_down:
            raise AdapterLost("the model server cannot be reached")
