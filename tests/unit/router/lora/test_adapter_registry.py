"""Loading, unloading, eviction and requests in any order: no wrong adapter, no leak, no request that waits for ever."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest
from support.fake_adapter_shards import FakeAdapterShards

from router.errors import GenerationError, ValidationError
from router.lora.registry import AdapterRefused, AdapterRegistry
from router.metrics import Metrics


def registry_of(shards: FakeAdapterShards, most_bytes: int = 3, **options: Any) -> AdapterRegistry:
    return AdapterRegistry(["given"], Metrics(), shards, most_bytes=most_bytes, **options)


async def settled() -> None:
    """Until the other tasks only wait for each other. They take turns of the loop, not time, which a busy machine may
    spend in one turn."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_an_adapter_is_loaded_once_and_stays() -> None:
    shards = FakeAdapterShards()
    registry = registry_of(shards)
    await registry.register("a", "folder")
    assert registry.names == ("given", "a") and "a" in registry and not shards.loaded
    uses = await asyncio.gather(*(registry.use("a") for _ in range(3)))
    assert {use.load_id for use in uses} == {1} and shards.loaded == {1: "folder"}
    for use in uses:
        use.release()
        use.release()
    assert (await registry.use("a")).load_id == 1
    assert (await registry.use("given")).load_id is None
    with pytest.raises(ValidationError, match="`adapter_id` b is not known to this server"):
        await registry.use("b")


async def test_the_one_used_longest_ago_leaves() -> None:
    shards = FakeAdapterShards()
    metrics = Metrics()
    registry = AdapterRegistry([], metrics, shards, most_bytes=2)
    for name in "abc":
        await registry.register(name, name)
    for name in "aba":
        (await registry.use(name)).release()
    (await registry.use("c")).release()
    assert set(shards.loaded.values()) == {"a", "c"}
    text = metrics.render().decode()
    for line in (
        "tgi_lora_evictions 1",
        'tgi_lora_adapters{state="host"} 2',
        'tgi_lora_adapters{state="registered"} 3',
        "tgi_lora_requests_waiting 0",
        "tgi_lora_load_duration_count 3",
    ):
        assert f"\n{line}\n" in text


async def test_a_load_waits_until_a_request_ends() -> None:
    shards = FakeAdapterShards()
    registry = registry_of(shards, most_bytes=1)
    await registry.register("a", "a")
    await registry.register("b", "b")
    first = await registry.use("a")
    waiting = asyncio.create_task(registry.use("b"))
    await settled()
    assert not waiting.done() and set(shards.loaded.values()) == {"a"}
    first.release()
    assert (await waiting).load_id == 2 and set(shards.loaded.values()) == {"b"}


async def test_nobody_passes_a_load_that_has_waited_long() -> None:
    """Else requests for loaded adapters, always one more before the last ends, would keep it out for ever."""
    shards = FakeAdapterShards()
    registry = registry_of(shards, most_bytes=1, patience_s=0.0)
    await registry.register("a", "a")
    await registry.register("b", "b")
    held = await registry.use("a")
    starved = asyncio.create_task(registry.use("b"))
    await settled()
    late = asyncio.create_task(registry.use("a"))
    await settled()
    assert not late.done()
    held.release()
    (await starved).release()
    assert (await late).load_id == 3


async def test_a_load_that_nobody_waits_for_ends() -> None:
    shards = FakeAdapterShards()
    registry = registry_of(shards, most_bytes=1, patience_s=0.0)
    await registry.register("a", "a")
    await registry.register("b", "b")
    held = await registry.use("a")
    left = asyncio.create_task(registry.use("b"))
    await settled()
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    again = await asyncio.wait_for(registry.use("a"), 30)
    assert again.load_id == held.load_id and shards.loaded == {1: "a"}


async def test_one_that_takes_more_than_was_said_keeps_nobody_waiting() -> None:
    shards = FakeAdapterShards()
    registry = registry_of(shards)
    await registry.register("a", "a")
    await registry.register("b", "b")
    shards.sizes["a"] = 4
    for _ in range(2):
        with pytest.raises(ValidationError, match="LoRA adapter `a`: 1 MB do not fit --lora-host-memory"):
            await registry.use("a")
    await asyncio.wait_for(registry.use("b"), 30)
    assert set(shards.loaded.values()) == {"b"}


async def test_one_that_takes_more_than_was_said_waits_for_room() -> None:
    """What is loaded with it stays within the budget."""
    shards = FakeAdapterShards()
    registry = registry_of(shards)
    for name in "abc":
        await registry.register(name, name)
    held, unused = await registry.use("a"), await registry.use("b")
    unused.release()
    shards.sizes["c"] = 3
    waiting = asyncio.create_task(registry.use("c"))
    await settled()
    assert not waiting.done() and shards.loaded == {1: "a"}
    held.release()
    assert (await waiting).load_id == 4 and shards.loaded == {4: "c"}


async def test_ten_thousand_names() -> None:
    """Of which none takes more than its name and place."""
    shards, metrics = FakeAdapterShards(), Metrics()
    registry = AdapterRegistry([], metrics, shards, most_bytes=2)
    for number in range(10_000):
        await registry.register(f"a{number}", f"folder/{number}")
    for number in (9_999, 0, 5_000):
        (await registry.use(f"a{number}")).release()
    assert set(shards.loaded.values()) == {"folder/0", "folder/5000"} and len(registry.names) == 10_000
    assert b'tgi_lora_adapters{state="registered"} 10000\n' in metrics.render()


async def test_a_new_version_in_place_of_one_that_runs() -> None:
    shards = FakeAdapterShards()
    registry = registry_of(shards)
    await registry.register("a", "old")
    running = await registry.use("a")
    await registry.register("a", "new")
    later = await registry.use("a")
    assert shards.loaded == {1: "old", 2: "new"} and (running.load_id, later.load_id) == (1, 2)
    running.release()
    await registry.close()
    assert shards.loaded == {2: "new"}
    assert registry.remove("a") and not registry.remove("a")
    later.release()
    await registry.close()
    assert not shards.loaded


async def test_of_two_that_take_a_name_at_once_one_is_refused() -> None:
    registry = registry_of(FakeAdapterShards())
    first, second = await asyncio.gather(
        *(registry.register("a", path, replaces=False) for path in ("one", "two")), return_exceptions=True
    )
    assert first is None and isinstance(second, AdapterRefused) and "has already been loaded" in str(second)
    assert registry.path_of("a") == "one"


async def test_what_is_refused_and_what_fails() -> None:
    shards = FakeAdapterShards({"big": 4})
    registry = registry_of(shards)
    with pytest.raises(AdapterRefused, match="LoRA adapter `b`: 1 MB do not fit --lora-host-memory"):
        await registry.register("b", "big")
    shards.refused.add("bad")
    with pytest.raises(AdapterRefused, match="it is damaged"):
        await registry.register("b", "bad")
    assert "b" not in registry
    await registry.register("a", "a")
    shards.refused.add("a")
    with pytest.raises(ValidationError, match="it is damaged"):
        await registry.use("a")
    shards.refused.clear()
    shards.is_down = True
    with pytest.raises(GenerationError, match="cannot be reached"):
        await registry.use("a")
    shards.is_down = False
    assert (await registry.use("a")).load_id is not None


@pytest.mark.parametrize("seed", range(20))
async def test_any_order(seed: int) -> None:
    """Requests come, end and are cancelled while adapters are registered, replaced, removed and evicted."""
    random = Random(seed)

    async def wait() -> None:
        for _ in range(random.randrange(4)):
            await asyncio.sleep(0)

    names, most_bytes = [f"a{i}" for i in range(6)], 5
    shards = FakeAdapterShards({f"{name}-{v}": random.randint(1, 3) for name in names for v in range(50)}, wait=wait)
    registry = registry_of(shards, most_bytes=most_bytes, patience_s=random.choice([0.0, 10.0]), most_loaded=4)
    current: dict[str, str] = {}
    served = 0

    async def request() -> None:
        nonlocal served
        name = random.choice(names)
        before = current.get(name)
        try:
            use = await registry.use(name)
        except ValidationError:
            return
        try:
            path = shards.loaded[use.load_id or 0]
            assert path.split("-")[0] == name, "another adapter"
            assert before is None or int(path.split("-")[1]) >= int(before.split("-")[1]), "a version that was replaced"
            await wait()
            assert shards.loaded[use.load_id or 0] == path, "it left under a request"
            served += 1
        finally:
            use.release()

    requests: list[asyncio.Task[None]] = []
    for step in range(200):
        choice = random.random()
        name = random.choice(names)
        if choice < 0.15:
            path = f"{name}-{step % 50 if step < 50 else 49}"
            if name not in current or int(path.split("-")[1]) >= int(current[name].split("-")[1]):
                await registry.register(name, path)
                current[name] = path
        elif choice < 0.2:
            registry.remove(name)
            current.pop(name, None)
        elif choice < 0.25 and requests:
            random.choice(requests).cancel()
        else:
            requests.append(asyncio.create_task(request()))
        await wait()
    results = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 30)
    assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results), results
    assert served > 20 and shards.most_bytes <= most_bytes + 3  # one more may still be leaving
    for name in names:
        registry.remove(name)
    await registry.close()
    assert not shards.loaded
