"""The router's registry of adapters above the ranks' own: loads, unloads, evictions and requests in any order.

Two ranks with slots, as on GPUs; loads fail on one of them now and then.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Collection
from pathlib import Path
from random import Random
from typing import Any

import pytest

from model_server.adapters.slot_table import SlotTable
from model_server.errors import StartupError
from model_server.features.adapters.residents import Residence, Residents
from router.errors import GenerationError, ValidationError
from router.lora.registry import AdapterLost, AdapterRefused, AdapterRegistry, AdapterSize
from router.metrics import Metrics

NAMES = [f"a{number}" for number in range(6)]
NUM_SLOTS, MOST_BYTES = 3, 5


class Loaded:
    """A folder as it was when it was read; one byte."""

    nbytes = 1

    def __init__(self, name: str, weights: str) -> None:
        self.name, self.weights = name, weights
        self.rank, self.headers = 4, {}  # type: ignore[var-annotated]


class Rank:
    """What a shard keeps: adapters by their numbers in host memory, and copies of them in slots."""

    def __init__(self, root: Path) -> None:
        self.on_host: dict[int, str] = {}
        self.in_slots: dict[int, str] = {}
        self.running: dict[int, int] = {}  # slots of requests
        self.table = SlotTable(NUM_SLOTS, self._copy)
        self.fails = False
        self.residents = Residents(self, range(8), root, lambda name, path: self._checked(name, path.name), 1)

    def _checked(self, name: str, weights: str) -> Any:
        if self.fails:
            raise StartupError(f"LoRA adapter `{name}`: it is damaged here")
        return Loaded(name, weights)

    def _copy(self, slot: int, number: int) -> bool:
        self.in_slots[slot] = self.on_host[number]
        return False

    def read(self, adapter: Any) -> Any:
        return adapter

    def put(self, number: int, loaded: Any) -> None:
        assert number not in self.on_host, "two adapters with one number"
        self.on_host[number] = loaded.weights

    def remove(self, number: int) -> None:
        self.table.forget(number)
        del self.on_host[number]

    def in_use(self) -> Collection[int]:
        return set(self.running.values())


class Ranks:
    """All ranks or none, as `ShardPool` has it."""

    def __init__(self, ranks: list[Rank], random: Random) -> None:
        self.ranks, self._random = ranks, random

    async def pause(self) -> None:
        for _ in range(self._random.randrange(4)):
            await asyncio.sleep(0)

    async def check_adapter(self, name: str, path: str) -> AdapterSize:
        await self.pause()
        return AdapterSize(1, 4)

    async def load_adapter(self, load_id: int, name: str, path: str) -> AdapterSize:
        unlucky = self._random.choice([None, None, None, *self.ranks])
        try:
            for rank in self.ranks:
                rank.fails = rank is unlucky
                await self.pause()
                rank.residents.load(load_id, name, path)
        except StartupError as error:
            await self.drop_adapter(load_id)
            raise AdapterRefused(str(error)) from None
        return AdapterSize(1, 4)

    async def drop_adapter(self, load_id: int) -> None:
        await self.pause()
        for rank in self.ranks:  # a numbered call: between the same two steps on all
            rank.residents.drop(load_id)


async def one_request(number: int, name: str, registry: AdapterRegistry, ranks: Ranks, least: str) -> bool:
    """Whether it got its adapter: of its name, not older than `least`, the same on all ranks and to its end."""
    try:
        use = await registry.use(name)
    except (ValidationError, GenerationError):
        return False
    held: list[Residence] = []
    try:
        assert use.load_id is not None
        held += [found for rank in ranks.ranks if (found := rank.residents.find(use.load_id)) is not None]
        found = None  # the frame of a cancelled request lives on
        assert len(held) == 2, "it left under a request"
        slots: list[int | None] = [None]
        while None in slots:  # as the scheduler does: until there is a slot
            slots = [
                rank.table.acquire(residence.number, rank.in_use)
                for rank, residence in zip(ranks.ranks, held, strict=True)
            ]
            if None in slots:
                await asyncio.sleep(0)
        assert len(set(slots)) == 1, "ranks disagree"
        for rank, slot in zip(ranks.ranks, slots, strict=True):
            assert slot is not None
            rank.running[number] = slot
        weights = ranks.ranks[0].in_slots[slots[0] or 0]
        assert weights.split("-")[0] == name and int(weights.split("-")[1]) >= int(least.split("-")[1])
        for _ in range(3):
            await ranks.pause()
            assert all(rank.in_slots[rank.running[number]] == weights for rank in ranks.ranks), "a slot was given away"
        return True
    finally:
        for rank in ranks.ranks:
            rank.running.pop(number, None)
        held.clear()
        use.release()


async def run(seed: int, root: Path) -> None:
    random = Random(seed)
    current: dict[str, str] = {}
    ranks = Ranks([Rank(root) for _ in range(2)], random)
    patience_s = random.choice([0.0, 10.0])
    registry = AdapterRegistry([], Metrics(), ranks, most_bytes=MOST_BYTES, patience_s=patience_s, most_loaded=4)
    requests: list[asyncio.Task[bool]] = []
    for step in range(250):
        name, choice = random.choice(NAMES), random.random()
        if choice < 0.15:
            await registry.register(name, f"{name}-{step}")  # other weights under the same name
            current[name] = f"{name}-{step}"
        elif choice < 0.22:
            registry.remove(name)
        elif choice < 0.27 and requests:
            random.choice(requests).cancel()
        else:
            requests.append(asyncio.create_task(one_request(step, name, registry, ranks, current.get(name, "-0"))))
        await ranks.pause()
    results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 60)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result
    assert sum(result is True for result in results) > 20
    for name in NAMES:
        registry.remove(name)
    await registry.close()
    del results
    requests.clear()
    for rank in ranks.ranks:
        assert not rank.on_host and rank.residents.num_free == 8 and rank.table.num_held == 0 and not rank.running


@pytest.mark.parametrize("seed", range(8))
async def test_any_order(seed: int, tmp_path: Path) -> None:
    await run(seed, tmp_path)


async def fails(root: Path) -> bool:
    for seed in range(8):
        try:
            await run(seed, root)
        except AssertionError:
            return True
    return False


async def test_a_slot_that_is_given_away_too_early_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "in_use", lambda rank: ())
    assert await fails(tmp_path)


async def test_a_load_id_that_is_used_again_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that kept what it has under an id would answer a reload with the old weights."""
    monkeypatch.setattr("router.lora.registry.itertools.count", lambda first: itertools.repeat(first))

    def load(residents: Residents, load_id: int, name: str, path: str, real: Any = Residents.load) -> Any:
        return None if residents.find(load_id) is not None else real(residents, load_id, name, path)

    monkeypatch.setattr(Residents, "load", load)
    assert await fails(tmp_path)


async def test_a_rank_that_keeps_what_another_refused_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def load(ranks: Ranks, load_id: int, name: str, path: str) -> AdapterSize:
        try:
            for number, rank in enumerate(ranks.ranks):
                rank.fails = number == 1 and load_id % 3 == 0
                rank.residents.load(load_id, name, path)
        except StartupError as error:
            raise AdapterLost(str(error)) from None
        return AdapterSize(1, 4)

    monkeypatch.setattr(Ranks, "load_adapter", load)
    assert await fails(tmp_path)
