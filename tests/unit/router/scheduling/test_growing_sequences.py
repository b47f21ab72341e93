"""Requests that outgrow what they reserved: blocks in place, or the youngest yields and comes back unchanged."""

from __future__ import annotations

import random

import pytest
from support.fake_rows import Script
from support.fake_shard import FakeShard
from support.scheduler_harness import Harness, collect, running_scheduler, tokens_of

from router.events import Finished
from router.scheduling import growth
from router.scheduling.queue import request_queue


@pytest.fixture(autouse=True)
def _small_reservations(monkeypatch):
    monkeypatch.setattr(request_queue, "RESERVED_NEW_TOKENS", 4)
    monkeypatch.setattr(growth, "_STEP_TOKENS", 2)


def shard(**changes) -> FakeShard:
    return FakeShard(chunking=True, **changes)


def names(name: str, count: int) -> list[str]:
    return [f"{name}{i}" for i in range(1, count + 1)]


async def text_of(h: Harness, name: str) -> list[str]:
    return tokens_of(await collect(h.entries[name]))


@pytest.mark.parametrize("block_size", [1, 2, 4])
async def test_a_request_starts_small_and_grows_in_place(block_size):
    async with running_scheduler(shard(block_size=block_size), max_batch_total_tokens=400) as h:
        h.submit("a", 5, 30)
        await h.step(1)
        held = h.scheduler.allocator.num_usable - h.scheduler.allocator.num_free
        assert held == -(-(5 + 4 - 1) // block_size)
        await h.finish()
        assert await text_of(h, "a") == names("a", 30)
        assert all(step.startswith(("P", "D")) for step in h.trace)


async def test_short_requests_reserve_all_they_need():
    async with running_scheduler(shard(), max_batch_total_tokens=400) as h:
        h.submit("a", 5, 4)
        await h.finish()
        assert not any(request.new_blocks for rpc, request in h.shard.received if rpc == "Decode")


async def test_the_youngest_yields_and_comes_back_unchanged():
    async with running_scheduler(shard(), max_batch_total_tokens=31) as h:
        for name in "abc":
            h.submit(name, 4, 20)  # 23 positions each; 30 in all
        await h.finish()
        for name in "abc":
            assert await text_of(h, name) == names(name, 20)
        assert h.metrics.counts["tgi_request_preempted"] >= 2
        assert "P(a,b,c)" in h.trace
        resumed = [r for rpc, m in h.shard.received if rpc == "Prefill" for r in m.batch.requests if r.resume_ids]
        assert resumed and all(r.id > 0 for r in resumed)  # never the oldest


async def test_the_least_urgent_yields_before_the_youngest():
    async with running_scheduler(shard(), max_batch_total_tokens=16) as h:
        h.submit("a", 3, 11, priority=1)
        h.submit("b", 3, 11)
        await h.finish()
        assert h.entries["a"].num_preemptions and not h.entries["b"].num_preemptions
        for name in "ab":
            assert await text_of(h, name) == names(name, 11)


async def test_the_final_event_counts_tokens_of_all_lives():
    async with running_scheduler(shard(scripts={"b": Script(eos_after=9)}), max_batch_total_tokens=16) as h:
        h.submit("a", 3, 11)
        b = h.submit("b", 3, 11)
        await h.finish()
        last = (await collect(b))[-1]
        assert isinstance(last, Finished)
        assert h.entries["b"].num_preemptions > 0
        assert (last.generated_tokens, last.finish_reason) == (9, "eos_token")
        assert last.text == "".join(f" b{i}" for i in range(1, 10))


async def test_a_preempted_request_whose_caller_leaves_is_forgotten():
    async with running_scheduler(shard(), max_batch_total_tokens=16) as h:
        h.submit("a", 3, 11)
        b = h.submit("b", 3, 11)
        while not h.entries["b"].num_preemptions:
            await h.step(1)
        b.close()
        await h.finish()
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 1
        assert await text_of(h, "a") == names("a", 11)


async def test_nobody_is_admitted_before_those_that_had_to_yield():
    async with running_scheduler(shard(), max_batch_total_tokens=16) as h:
        h.submit("a", 3, 11)
        h.submit("b", 3, 11)
        while not h.entries["b"].num_preemptions:
            await h.step(1)
        h.submit("c", 1, 1)
        await h.finish()
        admitted = [r.id for rpc, m in h.shard.received if rpc == "Prefill" for r in m.batch.requests]
        assert admitted == sorted(admitted[:2]) + admitted[2:]
        assert admitted.index(2) == len(admitted) - 1


async def test_after_three_preemptions_all_is_reserved(monkeypatch):
    async with running_scheduler(shard(), max_batch_total_tokens=61) as h:
        for name in "abcd":
            h.submit(name, 2, 40)
        await h.finish()
        for name in "abcd":
            assert await text_of(h, name) == names(name, 40)
        assert max(e.num_preemptions for e in h.entries.values()) <= 3


async def test_a_request_beyond_the_pool_is_refused_at_once():
    async with running_scheduler(shard(), max_batch_total_tokens=16) as h:
        assert h.scheduler.can_ever_fit(5, 11)
        assert not h.scheduler.can_ever_fit(5, 12)


@pytest.mark.parametrize("seed", range(6))
async def test_a_split_prompt_that_had_to_yield_is_not_split_there_again(seed):
    # Prompts with a common beginning, the last one split; it yields together with others, and finds more in the cache.
    rng = random.Random(seed)
    count, common = rng.randint(8, 14), rng.randint(6, 12)
    budget = count * (common + 1) + common - rng.randint(0, 2)
    capacity = (count + 1) * (common + 1 + rng.randint(2, 3)) + rng.randint(1, 6)
    clever = shard(prefix_caching=True, max_prefill_tokens=budget)
    limits = {"max_batch_prefill_tokens": budget, "max_batch_total_tokens": capacity}
    async with running_scheduler(clever, stepwise=False, **limits) as h:
        for i in range(count + 1):
            new_tokens = rng.randint(5, 30)
            if h.scheduler.can_ever_fit(common + 1, new_tokens):
                h.submit(f"r{i}", common + 1, new_tokens, input_ids=(*range(common), 1000 + i))
        await h.finish()
        for rpc, message in h.shard.received:
            if rpc == "Prefill":  # at most the last one is split
                assert not any(r.HasField("chunk_len") for r in message.batch.requests[:-1])
