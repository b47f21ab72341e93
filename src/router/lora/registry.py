"""Which LoRA adapters requests may name, and which the shards hold.

Given ones always stay; registered ones load when needed, the least recent leaving. Load ids are never reused, so KV of
versions cannot mix.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from router.errors import GenerationError, ValidationError
from router.metrics import Metrics

logger = logging.getLogger(__name__)

MOST_LOADED = 256
"""Adapters in the shards' memory at once, whatever their size; the shards have no more places."""
PATIENCE_S = 1.0
"""So long requests for adapters that are loaded may pass one that waits for room; then they wait until it has it."""


class AdapterRefused(Exception):
    """A shard does not serve an adapter; the message names it."""


class AdapterLost(Exception):
    """The shards failed."""


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """An adapter's memory on the fullest rank, and largest rank."""

    num_bytes: int
    rank: int
    # By one rank of each of several machines; empty: by none.
    digest: bytes = b""


class AdapterShards(Protocol):
    """Loads adapters on all ranks or none; raises AdapterRefused, AdapterLost."""

    async def check_adapter(self, name: str, path: str) -> AdapterSize:
        """Estimate an upper size, without loading."""

    async def load_adapter(self, load_id: int, name: str, path: str) -> AdapterSize: ...

    async def drop_adapter(self, load_id: int) -> None:
        """What was sent before still gets it."""


@dataclass(slots=True, eq=False)
class _Version:
    """One registered folder."""

    name: str
    path: str
    # An estimate until loaded.
    num_bytes: int
    load_id: int | None = None
    # Requests with it or waiting; it stays for them.
    users: int = 0
    # No further request gets it.
    is_removed: bool = False
    loading: asyncio.Task[None] | None = None


@dataclass(slots=True)
class AdapterUse:
    """A request's hold on a loaded adapter; `load_id` None: by name."""

    load_id: int | None
    _release: Callable[[], None] = field(default=lambda: None)
    _is_released: bool = False

    def release(self) -> None:
        """Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._release()


class AdapterRegistry:
    """A server's adapters, on the event loop."""

    def __init__(
        self,
        given: Sequence[str],
        metrics: Metrics,
        shards: AdapterShards | None = None,
        *,
        most_bytes: int = 0,
        patience_s: float = PATIENCE_S,
        most_loaded: int = MOST_LOADED,
    ) -> None:
        """Take given names, and what loads others.

        Args:
            most_bytes: Of loaded ones, on each rank.
        """
        self._given = tuple(given)
        self._metrics = metrics
        self._shards = shards
        self._most_bytes = most_bytes
        self._most_loaded = most_loaded
        self._patience_s = patience_s
        self._by_name: dict[str, _Version] = {}
        self._loaded: OrderedDict[int, _Version] = OrderedDict()  # the one used longest ago first
        self._num_bytes = 0
        self._in_load: set[_Version] = set()
        self._ids = itertools.count(1)
        self._one_load = asyncio.Lock()
        self._released = asyncio.Event()
        self._waits_since: float | None = None  # a load for room
        self._dropping: set[asyncio.Task[None]] = set()
        metrics.add_values("adapter", self._given)
        self._count()

    @property
    def names(self) -> tuple[str, ...]:
        return (*self._given, *self._by_name)

    @property
    def loading(self) -> set[str]:
        """Names of those that requests wait for."""
        return {version.name for version in self._in_load if version.users}

    def __contains__(self, name: object) -> bool:
        return name in self._given or name in self._by_name

    def path_of(self, name: str) -> str | None:
        """Return a registered adapter's folder."""
        version = self._by_name.get(name)
        return None if version is None else version.path

    async def register(self, name: str, path: str, *, replaces: bool = True) -> None:
        """Offer an adapter; an earlier version leaves with its last request.

        Raises:
            AdapterRefused: Also for a name taken meanwhile, unless it `replaces` it.
        """
        assert self._shards is not None
        size = await self._shards.check_adapter(name, path)
        self._check_fits(name, size.num_bytes)
        if name in self._by_name and not replaces:
            raise AdapterRefused(f"The lora adapter '{name}' has already been loaded: choose another name")
        self.remove(name)
        self._by_name[name] = _Version(name, path, size.num_bytes)
        self._metrics.add_values("adapter", [name])
        self._count()

    def remove(self, name: str) -> bool:
        """Withdraw an adapter; return whether there was one."""
        version = self._by_name.pop(name, None)
        if version is None:
            return False
        version.is_removed = True
        self._drop_if_unused(version)
        self._count()
        return True

    async def use(self, name: str) -> AdapterUse:
        """Hold an adapter, loading it if need be."""
        if name in self._given:
            return AdapterUse(None)
        version = self._find(name)
        while version.load_id is not None and self._is_short:
            # Without a hold on it: it may be what has to make room.
            await self._pause()
            version = self._find(name)
        version.users += 1
        try:
            while version.load_id is None:
                await self._load(version)
        except AdapterRefused as error:
            self._release(version)
            raise ValidationError(str(error)) from None
        except AdapterLost as error:
            self._release(version)
            raise GenerationError(str(error)) from None
        except BaseException:
            self._release(version)
            raise
        self._loaded.move_to_end(version.load_id)
        return AdapterUse(version.load_id, lambda: self._release(version))

    async def close(self) -> None:
        """Wait for what is being dropped."""
        await asyncio.gather(*self._dropping, return_exceptions=True)

    def _find(self, name: str) -> _Version:
        version = self._by_name.get(name)
        if version is None:
            raise unknown(name)
        return version

    @property
    def _is_short(self) -> bool:
        """Whether a load has waited so long that others may not pass."""
        since = self._waits_since
        return since is not None and time.monotonic() - since > self._patience_s

    async def _pause(self) -> None:
        async with self._one_load:  # held by the load that waits
            pass

    async def _load(self, version: _Version) -> None:
        """Load once for all that wait."""
        if version.loading is None:
            version.loading = asyncio.get_running_loop().create_task(self._load_now(version))
            version.loading.add_done_callback(_read)
            self._in_load.add(version)
        self._count()
        await asyncio.shield(version.loading)

    @property
    def _num_waiting(self) -> int:
        return sum(version.users for version in self._in_load)

    async def _load_now(self, version: _Version) -> None:
        assert self._shards is not None
        try:
            async with self._one_load:
                await self._make_room(version)
                while version.users:  # else all that wanted it have left
                    load_id, started = next(self._ids), time.monotonic()
                    size = await self._shards.load_adapter(load_id, version.name, version.path)
                    if self._num_bytes + size.num_bytes <= self._most_bytes:
                        self._metrics.observe("tgi_lora_load_duration", time.monotonic() - started)
                        version.load_id, version.num_bytes = load_id, size.num_bytes
                        self._loaded[load_id] = version
                        self._num_bytes += size.num_bytes
                        return
                    # More than was said: the folder has changed, or what is added to its matrices takes more.
                    await self._shards.drop_adapter(load_id)
                    self._check_fits(version.name, size.num_bytes)
                    version.num_bytes = size.num_bytes
                    await self._make_room(version)
        finally:
            version.loading = None
            self._in_load.discard(version)
            self._drop_if_unused(version)
            self._count()

    async def _make_room(self, version: _Version) -> None:
        """Free memory until no request wants it."""
        try:
            while version.users and not self._has_room(version.num_bytes):
                unused = next((v for v in self._loaded.values() if not v.users), None)
                if unused is not None:
                    await self._drop(unused)
                    self._metrics.count("tgi_lora_evictions")
                    continue
                if self._waits_since is None:
                    self._waits_since = time.monotonic()
                self._released.clear()
                await self._released.wait()
        finally:
            self._waits_since = None

    def _has_room(self, num_bytes: int) -> bool:
        return self._num_bytes + num_bytes <= self._most_bytes and len(self._loaded) < self._most_loaded

    def _release(self, version: _Version) -> None:
        version.users -= 1
        self._drop_if_unused(version)
        if not version.users:
            self._released.set()

    def _drop_if_unused(self, version: _Version) -> None:
        """Drop a removed version without requests."""
        if version.is_removed and not version.users and version.load_id is not None:
            task = asyncio.get_running_loop().create_task(self._drop(version))
            self._dropping.add(task)
            task.add_done_callback(self._dropping.discard)

    async def _drop(self, version: _Version) -> None:
        assert self._shards is not None
        if version.load_id is None:
            return
        load_id, version.load_id = version.load_id, None
        del self._loaded[load_id]
        self._num_bytes -= version.num_bytes
        self._count()
        try:
            await self._shards.drop_adapter(load_id)
        except (AdapterRefused, AdapterLost) as error:
            logger.error("LoRA adapter `%s` could not be dropped: %s", version.name, error)

    def _check_fits(self, name: str, num_bytes: int) -> None:
        if num_bytes > self._most_bytes:
            raise AdapterRefused(f"LoRA adapter `{name}`: {-(-num_bytes // 10**6)} MB do not fit --lora-host-memory")

    def _count(self) -> None:
        num_registered = len(self._given) + len(self._by_name)
        self._metrics.gauge("tgi_lora_adapters", num_registered, state="registered")
        self._metrics.gauge("tgi_lora_adapters", len(self._given) + len(self._loaded), state="host")
        self._metrics.gauge("tgi_lora_requests_waiting", self._num_waiting)


def _read(task: asyncio.Task[None]) -> None:
    """Mark an awaited failure as seen."""
    if not task.cancelled():
        task.exception()


def unknown(name: str) -> ValidationError:
    """Return the refusal of an unknown adapter."""
    return ValidationError(f"`adapter_id` {name[:100]} is not known to this server")
