"""The scheduler and the prefix cache: what is shared, from when on, and what never is."""

from __future__ import annotations

import pytest
from support.fake_rows import token_of
from support.fake_shard import FakeShard, ShardFailure
from support.scheduler_harness import collect, running_scheduler, tokens_of

from router.scheduling.cache.states import Kind

BIG = {"max_batch_total_tokens": 1001, "max_batch_prefill_tokens": 4096}


def shard(**changes) -> FakeShard:
    return FakeShard(chunking=True, prefix_caching=True, max_prefill_tokens=4096, **changes)


def ids(count: int, first: int = 0) -> tuple[int, ...]:
    return tuple(range(first, first + count))


def cache_lens(h) -> dict[str, int]:
    prefills = [m for rpc, m in h.shard.received if rpc == "Prefill"]
    return {h.shard.names[r.id]: r.cache_len for m in prefills for r in m.batch.requests}


def check_all_is_free_or_cached(h) -> None:
    assert h.scheduler.allocator.num_free == h.scheduler.allocator.num_usable


async def test_p1_prompts_of_one_batch_share_nothing_and_are_kept_once():
    async with running_scheduler(shard(), **BIG) as h:
        h.submit("a", 300, 50, input_ids=ids(300))
        h.submit("b", 300, 50, input_ids=ids(300))
        await h.finish()
        assert cache_lens(h) == {"a": 0, "b": 0}
        check_all_is_free_or_cached(h)


async def test_a_prompt_is_shared_as_soon_as_it_is_computed():
    async with running_scheduler(shard(), **BIG) as h:
        h.submit("a", 300, 50, input_ids=ids(300))
        await h.step(2)
        h.submit("b", 300, 5, input_ids=ids(300))
        await h.finish()
        assert cache_lens(h) == {"a": 0, "b": 299}
        events = {name: await collect(h.entries[name]) for name in "ab"}
        assert tokens_of(events["b"]) == [f"b{i}" for i in range(1, 6)]
        assert {name: events[name][-1].cached_tokens for name in "ab"} == {"a": 0, "b": 299}


async def test_a_prompt_is_not_shared_while_it_is_being_computed():
    async with running_scheduler(shard(), max_batch_total_tokens=1001, max_batch_prefill_tokens=100) as h:
        h.shard.max_prefill_tokens = 100
        h.submit("a", 250, 50, input_ids=ids(250))
        await h.step(1)
        h.submit("b", 300, 5, input_ids=ids(300))
        await h.finish()
        assert h.trace[:3] == ["P(a:100)", "D(a:100)", "P(b:50+a)"]
        assert cache_lens(h)["b"] == 0


async def test_p2_generated_tokens_are_cached_too():
    async with running_scheduler(shard(), **BIG) as h:
        h.submit("a", 100, 50, input_ids=ids(100))
        await h.finish()
        answer = [token_of("a", n).ids[0] for n in range(1, 51)]
        h.submit("b", 170, 5, input_ids=(*ids(100), *answer, *ids(20, 500)))
        await h.finish()
        assert cache_lens(h)["b"] == 149  # the last token was never run


async def test_p3_prompt_logprobs_bypass_the_cache():
    async with running_scheduler(shard(), **BIG) as h:
        h.submit("a", 40, 5, input_ids=ids(40))
        await h.finish()
        h.submit("b", 40, 5, input_ids=ids(40), decoder_input_details=True)
        await h.finish()
        assert cache_lens(h)["b"] == 0


async def test_adapters_share_nothing_with_each_other_nor_with_the_base_model():
    async with running_scheduler(shard(), **BIG) as h:
        for name, adapter in (("a", None), ("b", "red"), ("c", "blue"), ("d", "red"), ("e", None)):
            h.submit(name, 40, 5, input_ids=ids(40), adapter_id=adapter)
            await h.finish()
        assert cache_lens(h) == {"a": 0, "b": 0, "c": 0, "d": 39, "e": 39}


async def test_p4_shared_blocks_are_counted_once():
    async with running_scheduler(shard(), **BIG) as h:
        h.submit("a", 400, 1, input_ids=ids(400))
        await h.finish()
        for name in "bcde":
            h.submit(name, 400, 50, input_ids=ids(400))
        await h.step(1)
        assert cache_lens(h) == {"a": 0, "b": 399, "c": 399, "d": 399, "e": 399}
        h.submit("f", 400, 50, input_ids=ids(400))
        await h.finish()
        assert cache_lens(h)["f"] == 399


async def test_p5_an_entry_that_is_put_back_poisons_nothing():
    async with running_scheduler(shard(), max_batch_total_tokens=9000, max_batch_prefill_tokens=4096) as h:
        for i in range(9):
            h.submit(f"r{i}", 512, 16, input_ids=ids(512, 1000 * i))
        await h.finish()
        assert set(cache_lens(h).values()) == {0}


async def test_p7_a_failed_prefill_leaves_nothing_in_the_cache():
    shards = shard()
    async with running_scheduler(shards, **BIG) as h:
        shards.failure = lambda rpc, request: ShardFailure("boom") if rpc == "Prefill" else None
        h.submit("a", 100, 5, input_ids=ids(100))
        await h.step(2)
        shards.failure = lambda rpc, request: None
        h.submit("b", 100, 5, input_ids=ids(100))
        await h.finish()
        assert cache_lens(h)["b"] == 0


async def test_a_preempted_request_finds_what_it_had_computed(monkeypatch):
    monkeypatch.setattr("router.scheduling.queue.request_queue.RESERVED_NEW_TOKENS", 4)
    monkeypatch.setattr("router.scheduling.growth._STEP_TOKENS", 2)
    async with running_scheduler(shard(), max_batch_total_tokens=40) as h:
        h.submit("a", 5, 8, input_ids=ids(5))
        h.submit("b", 5, 28, input_ids=ids(5, 100))
        h.submit("c", 5, 28, input_ids=ids(5, 200))
        await h.finish()
        resumed = [r for rpc, m in h.shard.received if rpc == "Prefill" for r in m.batch.requests if r.resume_ids]
        assert resumed and any(r.cache_len > 5 for r in resumed)
        assert tokens_of(await collect(h.entries["c"])) == [f"c{i}" for i in range(1, 29)]


@pytest.mark.parametrize("grid", [16, 64])  # of a CPU, and of a GPU
async def test_a_second_turn_continues_from_a_saved_state(grid: int):
    """Its last tokens may be others than where the answer began: 8 of them."""
    second = {}
    async with running_scheduler(
        shard(block_size=16, state_slots=12, state_grid=grid), max_batch_total_tokens=20_000
    ) as h:
        for number in range(4):
            length = 900 + number * (grid // 4 + 1)
            first = ids(length, 10_000 * (number + 1))
            second[f"b{number}"] = (*first[:-8], *ids(68, 10_000 * number + 5000))
            h.submit(f"a{number}", length, 5, input_ids=first, answer_start=length if number % 2 else 0)
        await h.finish()
        for name, prompt in second.items():
            h.submit(name, len(prompt), 5, input_ids=prompt)
        await h.finish()
        computed = [len(prompt) - cache_lens(h)[name] for name, prompt in second.items()]
        assert all(60 < count <= 60 + 8 + grid for count in computed), computed
        states = h.scheduler.allocator.states
        assert states is not None and states.counts.restored == len(second)
        assert sum(one.kind == Kind.USER for one in states._checkpoints) == 2
        assert states.num_free + states.num_checkpoints == states.num_slots
