"""Several batches side by side, one for each stage of a pipeline and one more."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.effort import examples
from support.fake_rows import Script
from support.fake_shard import FakeShard
from support.scheduler_harness import collect, running_scheduler, settle, tokens_of
from unit.router.scheduling.test_properties import fail_next_call

from router.scheduling import batches, growth
from router.scheduling.queue import request_queue

STAGES = 2


def staged(**options: object) -> FakeShard:
    return FakeShard(chunking=True, micro_batches=STAGES + 1, **options)  # type: ignore[arg-type]


async def test_requests_are_divided_among_as_many_batches_as_there_are_stages():
    shard = staged()
    async with running_scheduler(shard) as h:
        for name in "abcd":
            h.submit(name, 3, 4)
        await settle()
        assert shard.num_waiting == STAGES
        await h.step(6)
        assert h.trace == ["P(a,b)", "P(c,d)", "D(a,b)", "D(c,d)", "D(a,b)", "D(c,d)"]
        assert shard.max_in_flight == STAGES


async def test_full_batches_get_one_more_beside_them(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(batches, "FULL_ROWS", 2)
    async with running_scheduler(staged()) as h:
        for name in "abcdef":
            h.submit(name, 3, 4)
        await h.step(6)
        assert h.trace == ["P(a,b)", "P(c,d)", "P(e,f)", "D(a,b)", "D(c,d)", "D(e,f)"]


async def test_a_newcomer_joins_the_batch_with_the_fewest_requests():
    async with running_scheduler(staged()) as h:
        for name in "abc":
            h.submit(name, 3, 9)
        await h.step(3)
        assert h.trace == ["P(a,b)", "P(c)", "D(a,b)"]
        h.submit("d", 3, 4)
        await h.step(3)
        assert h.trace[3:] == ["D(c)", "D(a,b)", "P(d+c)"]


async def test_a_request_alone_runs_ahead():
    shard = staged()
    async with running_scheduler(shard) as h:
        h.submit("a", 3, 9)
        await h.step(1)
        assert shard.num_waiting == 2
        assert h.trace == ["P(a)"]


async def test_the_size_of_all_batches_together_is_limited():
    async with running_scheduler(staged(), max_batch_size=3) as h:
        for name in "abcdef":
            h.submit(name, 3, 4)
        await h.step(2)
        assert h.scheduler.num_running == 3
        assert h.trace[0] == "P(a,b,c)"


async def test_a_failed_step_ends_the_requests_of_its_batch_alone():
    shard = staged()
    async with running_scheduler(shard) as h:
        entries = {name: h.submit(name, 3, 4) for name in "abcd"}
        await h.step(2)
        fail_next_call(shard)
        await h.finish()
        ends = {name: len(tokens_of(await collect(entry))) for name, entry in entries.items()}
        assert sorted(ends.values()) == [1, 1, 4, 4]


async def test_a_batch_without_blocks_is_not_starved_by_the_others(monkeypatch: pytest.MonkeyPatch):
    """The youngest of all gives its blocks back, once nothing is in flight."""
    monkeypatch.setattr(request_queue, "RESERVED_NEW_TOKENS", 3)
    monkeypatch.setattr(growth, "_STEP_TOKENS", 1)
    async with running_scheduler(staged(), max_batch_total_tokens=14) as h:
        first, second = h.submit("a", 3, 7), h.submit("b", 3, 7)
        await h.finish()
        assert len(tokens_of(await collect(first))) == len(tokens_of(await collect(second))) == 7
        assert h.entries["b"].num_preemptions > h.entries["a"].num_preemptions == 0


class Stages:
    """When a step has been through all stages, each of which takes 1 for it: 0.02 from one to the next, 0.1 for the ids
    on their way back."""

    def __init__(self, count: int) -> None:
        self.free_at = [0.0] * count

    def end_of(self, sent_at: float) -> float:
        come_at = sent_at
        for stage, free_at in enumerate(self.free_at):
            self.free_at[stage] = max(free_at, come_at) + 1
            come_at = self.free_at[stage] + 0.02
        return come_at - 0.02 + 0.1


@pytest.mark.parametrize("num_stages", [2, 4, 8])
@pytest.mark.parametrize("is_full", [True, False])
async def test_stages_are_busy(num_stages: int, is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler on a clock of the test's own: with one micro-batch more than stages no stage waits, with as many
    the time between them is lost."""
    monkeypatch.setattr(batches, "FULL_ROWS", 4 if is_full else 1000)
    shard = FakeShard(chunking=True, micro_batches=num_stages + 1)
    num_micro_batches = num_stages + is_full
    warm, num_steps = 4 * num_micro_batches, 14 * num_micro_batches
    stages, ends, now = Stages(num_stages), [], 0.0
    async with running_scheduler(shard, max_batch_prefill_tokens=4096) as h:
        for number in range(4 * (num_stages + 1)):
            h.submit(f"r{number}", 3, 16)
        await settle()
        for step in range(num_steps):
            ends += [stages.end_of(now) for _ in range(shard.num_waiting + step - len(ends))]
            now = ends[step]
            await h.step(1)
        assert shard.max_in_flight == num_micro_batches
    busy = (num_steps - warm) / (ends[num_steps - 1] - ends[warm - 1])
    possible = num_micro_batches / max(num_micro_batches, num_stages + 0.02 * (num_stages - 1) + 0.1)
    assert busy == pytest.approx(possible, abs=0.01)
    assert busy > (0.95 if is_full else 0.9)


@settings(max_examples=examples(25, 500), deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 25), st.integers(1, 9)), min_size=1, max_size=12),
    ends=st.dictionaries(st.sampled_from([f"r{i}" for i in range(12)]), st.integers(1, 6), max_size=4),
    num_stages=st.sampled_from([2, 3, 4]),
    full_rows=st.sampled_from([1, 64]),
    total_tokens=st.sampled_from([40, 60, 400]),
)
def test_every_request_gets_the_tokens_that_it_gets_without_stages(
    arrivals, ends, num_stages, full_rows, total_tokens
) -> None:
    async def tokens(micro_batches: int) -> dict[str, list[str]]:
        shard = FakeShard(
            chunking=True, micro_batches=micro_batches, scripts={r: Script(eos_after=n) for r, n in ends.items()}
        )
        limits = {"max_batch_total_tokens": total_tokens, "max_batch_prefill_tokens": 12, "default_prefill_tokens": 4}
        async with running_scheduler(shard, **limits) as h:
            for number, (steps, length, new) in enumerate(arrivals):
                if h.scheduler.can_ever_fit(length, new):
                    h.submit(f"r{number}", length, new)
                await h.step(steps)
            await h.finish()
            return {name: tokens_of(await collect(entry)) for name, entry in h.entries.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "FULL_ROWS", full_rows)
        patch.setattr(request_queue, "RESERVED_NEW_TOKENS", 3)
        patch.setattr(growth, "_STEP_TOKENS", 2)
        assert asyncio.run(tokens(num_stages + 1)) == asyncio.run(tokens(1))
