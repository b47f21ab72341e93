"""What fails, for whom, and that nothing is still held."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from support.fake_rows import Script
from support.fake_shard import FakeShard, ShardFailure
from support.scheduler_harness import collect, running_scheduler, settle, tokens_of

from router.errors import GenerationError, UnhealthyError
from router.events import Failed, Finished
from router.request import StoppingParameters
from router.shards.interface import PROBE_ID
from router.shards.pool import ShardPool

MESSAGE = "Request failed during generation: Server error: out of luck"


def fail_once(rpc: str, after: int = 0, code: grpc.StatusCode = grpc.StatusCode.INTERNAL):
    """A failure hook: the call number `after` (from 0) of this kind fails."""
    seen = 0

    def failure(called: str, request) -> ShardFailure | None:
        nonlocal seen
        if called != rpc:
            return None
        seen += 1
        return ShardFailure("out of luck", code=code) if seen == after + 1 else None

    return failure


async def test_f1_a_failed_prefill_hurts_only_the_newcomers():
    shard = FakeShard()
    async with running_scheduler(shard, waiting_served_ratio=0.0) as h:
        shard.failure = fail_once("Prefill", after=1)
        a = h.submit("a", 3, 6)
        await h.step(2)
        b = h.submit("b", 3, 6)
        await h.finish()
        assert str((await collect(b))[-1].error) == MESSAGE
        assert tokens_of(await collect(a)) == [f"a{i}" for i in range(1, 7)]
        assert "C(1)" in h.trace
        assert h.metrics.counts["tgi_batch_inference_failure{prefill}"] == 1
        assert h.metrics.counts["tgi_request_failure{generation}"] == 1


async def test_f1_trace():
    shard = FakeShard(pipeline_depth=1)
    async with running_scheduler(shard, waiting_served_ratio=0.0) as h:
        shard.failure = fail_once("Prefill", after=1)
        h.submit("a", 3, 4)
        await h.step(1)
        h.submit("b", 3, 6)
        await h.finish()
        assert h.trace == ["P(a)", "D(a)", "P!(1)", "C(1)", "D(a)", "D(a)"]


async def test_f3_a_failed_decode_fails_its_batch_once_and_the_queue_goes_on():
    shard = FakeShard()
    async with running_scheduler(shard, max_batch_size=2) as h:
        shard.failure = fail_once("Decode", after=2)
        a, b = h.submit("a", 3, 9), h.submit("b", 3, 9)
        c = h.submit("c", 3, 3)
        await h.finish()
        for entry in (a, b):
            assert str((await collect(entry))[-1].error) == MESSAGE
        assert tokens_of(await collect(c)) == ["c1", "c2", "c3"]
        assert h.trace.count("C(0)") == 1
        counts = h.metrics.counts
        assert counts["tgi_batch_inference_failure{decode}"] == 2, "one more was in flight"
        assert counts["tgi_batch_inference_count{decode}"] == (
            counts["tgi_batch_inference_success{decode}"] + counts["tgi_batch_inference_failure{decode}"]
        )
        assert counts["tgi_request_failure{generation}"] == 2


async def test_a_failed_merge_clears_both_ids():
    shard = FakeShard()
    async with running_scheduler(shard, waiting_served_ratio=0.0) as h:
        a = h.submit("a", 3, 30)
        await h.step(1)
        b = h.submit("b", 3, 30)

        def fail_merge(rpc, request):
            if rpc == "Decode" and len(request.batch_ids) == 2:
                return ShardFailure("out of luck")
            return None

        shard.failure = fail_merge
        await h.finish()
        assert str((await collect(a))[-1].error) == MESSAGE
        assert str((await collect(b))[-1].error) == MESSAGE
        assert {"C(0)", "C(1)"} <= set(h.trace)


async def test_a_failed_filter_is_a_step_error():
    shard = FakeShard()
    async with running_scheduler(shard) as h:
        shard.failure = fail_once("FilterBatch")
        a, b = h.submit("a", 3, 9), h.submit("b", 3, 9)
        await h.step(2)
        a.close()
        await h.finish()
        assert str((await collect(b))[-1].error) == MESSAGE
        assert "C(0)" in h.trace
        c = h.submit("c", 3, 2)
        await h.finish()
        assert isinstance((await collect(c))[-1], Finished)


async def test_a_failed_clear_is_survived():
    shard = FakeShard()
    async with running_scheduler(shard) as h:
        shard.failure = fail_once("ClearCache")
        h.submit("a", 3, 9).close()
        a = h.submit("a", 3, 9)
        await h.step(2)
        a.close()
        await h.finish()
        b = h.submit("b", 3, 2)
        await h.finish()
        assert isinstance((await collect(b))[-1], Finished)


async def test_f4_who_left_is_filtered():
    async with running_scheduler(FakeShard(pipeline_depth=1)) as h:
        a = h.submit("a", 3, 9)
        h.submit("b", 3, 4)
        await h.step(2)
        a.close()
        await h.finish()
        assert h.trace == ["P(a,b)", "D(a,b)", "D(a,b)", "F(b)", "D(b)"]
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 1


async def test_f5_the_batch_is_cleared_when_nobody_is_left():
    async with running_scheduler(FakeShard(pipeline_depth=1)) as h:
        a = h.submit("a", 3, 9)
        await h.step(2)
        a.close()
        await h.finish()
        assert h.trace == ["P(a)", "D(a)", "D(a)", "C(0)"]
        assert h.shard.batches == {}


@pytest.mark.parametrize("rpc", ["Prefill", "Decode", "FilterBatch"])
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
async def test_a_lost_shard_ends_everything(rpc, code):
    shard = FakeShard(pipeline_depth=1)
    async with running_scheduler(shard, max_batch_size=2) as h:
        shard.failure = fail_once(rpc, code=code)
        left, *others = [h.submit(name, 3, 9) for name in "abc"]
        await h.step(2)
        left.close()  # is filtered away
        shard.run_freely()
        ends = [(await collect(entry))[-1] for entry in others]
        assert {type(end) for end in ends} == {Failed}
        assert isinstance(ends[0].error, GenerationError)
        assert h.scheduler.failure is not None
        assert not await h.scheduler.check_health()
        with pytest.raises(UnhealthyError):
            h.submit("d")


async def test_a_shard_that_never_answers_is_lost():
    async with running_scheduler(FakeShard(), max_step_s=0.05) as h:
        a, b = h.submit("a", 3, 9), h.submit("b", 3, 9)
        for entry in (a, b):
            assert "no step finished for 0.05 s" in str((await collect(entry))[-1].error)
        assert h.scheduler.failure is not None
        assert not await h.scheduler.check_health()


async def test_an_unexpected_exception_fails_all_entries():
    shard = FakeShard()
    async with running_scheduler(shard) as h:
        a = h.submit("a", 3, 9)
        h.shards[0].edit = lambda rpc, response: object()
        shard.run_freely()
        assert isinstance((await collect(a))[-1], Failed)
        assert h.scheduler.failure is not None


async def test_a_prompt_that_cannot_be_sent_fails_alone():
    async with running_scheduler(FakeShard()) as h:
        a = h.submit("a", 3, 3)
        await h.step(1)
        stopping = StoppingParameters(max_new_tokens=3, stop_sequences=("\ud800",))
        before, bad, behind = h.submit("b", 3, 3), h.submit("bad", 3, stopping=stopping), h.submit("c", 3, 3)
        await h.finish()
        assert isinstance((await collect(bad))[-1], Failed)
        for good in (a, before, behind):
            assert isinstance((await collect(good))[-1], Finished)


async def test_who_has_just_ended_hears_it_even_if_the_next_call_cannot_be_sent(monkeypatch):
    async with running_scheduler(FakeShard(scripts={"a": Script(eos_after=2)})) as h:
        a, b = h.submit("a", 3, 9), h.submit("b", 3, 9)
        await h.step(1)

        def broken(*_):
            raise RuntimeError("boom")

        monkeypatch.setattr(ShardPool, "decode", broken)
        await h.step(1)
        assert isinstance(h.scheduler.failure, RuntimeError)
        assert tokens_of(await collect(a)) == ["a1", "a2"]
        assert isinstance((await collect(b))[-1], Failed)


class TestTwoRanks:
    async def test_every_request_is_reported_by_one_rank(self):
        shards = [FakeShard(rank=r, world_size=2) for r in range(2)]
        async with running_scheduler(*shards, stepwise=False) as h:
            entries = [h.submit(name, 3, 4) for name in "abc"]
            for name, entry in zip("abc", entries, strict=True):
                assert tokens_of(await collect(entry)) == [f"{name}{i}" for i in range(1, 5)]
            await h.finish()
            assert shards[0].trace == shards[1].trace

    async def test_f3_one_rank_fails_and_both_are_cleared(self):
        shards = [FakeShard(pipeline_depth=1, rank=r, world_size=2) for r in range(2)]
        async with running_scheduler(*shards) as h:
            shards[1].failure = fail_once("Decode", after=1)
            entries = [h.submit(name, 3, 9) for name in "ab"]
            await h.finish()
            for entry in entries:
                assert str((await collect(entry))[-1].error) == MESSAGE
            assert shards[0].trace[-1] == shards[1].trace[-1] == "C(0)"
            assert shards[0].batches == shards[1].batches == {}

    async def test_disagreement_is_a_step_error(self):
        shards = [FakeShard(rank=r, world_size=2) for r in range(2)]
        async with running_scheduler(*shards) as h:

            def forget_one(rpc, response):
                if rpc == "Decode" and response.batch.request_ids:
                    del response.batch.request_ids[-1]
                return response

            shards[1].edit = forget_one
            entries = [h.submit(name, 3, 9) for name in "ab"]
            await h.finish()
            for entry in entries:
                assert "disagree" in str((await collect(entry))[-1].error)
            assert shards[0].batches == shards[1].batches == {}

    async def test_a_dead_rank_does_not_wait_for_the_others(self):
        shards = [FakeShard(rank=r, world_size=2) for r in range(2)]
        async with running_scheduler(*shards) as h:
            a = h.submit("a", 3, 9)
            shards[1].failure = fail_once("Prefill", code=grpc.StatusCode.UNAVAILABLE)
            await settle()
            shards[1].step()  # rank 0 never answers
            assert isinstance((await collect(a))[-1], Failed)
            assert h.scheduler.failure is not None


async def test_a_request_that_cannot_be_written_does_not_hold_up_the_next():
    async with running_scheduler(FakeShard(), stepwise=False, max_batch_size=1) as h:
        bad, good = h.submit("bad", 3, 3, top_n_tokens=-1), h.submit("good", 3, 3)
        assert isinstance((await collect(bad))[-1], Failed)
        assert tokens_of(await collect(good)) == ["good1", "good2", "good3"]


async def test_a_failed_row_that_stays_listed_is_filtered():
    """Of several ranks only one may know of the failure: then all keep the row until they are told."""
    shard = FakeShard(scripts={"b": Script(error_at=3)})

    def keep_listed(rpc: str, response):
        if rpc == "Decode" and any(g.error for g in response.generations):
            response.batch.request_ids.append(1)
        return response

    shard.edit = keep_listed
    async with running_scheduler(shard) as h:
        a, b = h.submit("a", 3, 8), h.submit("b", 3, 8)
        await h.finish()
        assert isinstance((await collect(b))[-1], Failed)
        assert tokens_of(await collect(a)) == [f"a{i}" for i in range(1, 9)]
        assert h.trace.count("F(a)") == 1


class TestHealth:
    async def test_asks_the_devices_while_all_is_well(self):
        async with running_scheduler(FakeShard()) as h:
            assert await h.scheduler.check_health()
            assert h.trace == ["H"]

    async def test_a_flood_costs_one_call(self):
        async with running_scheduler(FakeShard()) as h:
            assert all(await asyncio.gather(*(h.scheduler.check_health() for _ in range(50))))
            assert h.trace == ["H"]

    async def test_generates_after_a_failure_and_then_asks_again(self):
        shard = FakeShard()
        async with running_scheduler(shard, stepwise=False) as h:
            shard.failure = fail_once("Prefill")
            await collect(h.submit("a", 3, 3))
            del h.trace[:]
            assert await h.scheduler.check_health()
            assert h.trace == ["probe"]
            assert await h.scheduler.check_health()
            assert h.trace == ["probe", "H"]

    async def test_a_failing_probe_is_cleared_and_repeated(self):
        shard = FakeShard()
        async with running_scheduler(shard, stepwise=False) as h:
            shard.failure = lambda rpc, request: ShardFailure("broken") if rpc in ("Prefill", "Health") else None
            assert not await h.scheduler.check_health()
            assert not await h.scheduler.check_health()
            await settle()
            assert h.trace == ["H!()", f"P!({2**64 - 1})", "C(probe)"]
            shard.failure = lambda rpc, request: None
            assert await h.scheduler.check_health()

    async def test_a_probe_whose_row_fails_says_no(self):
        """A model whose scores are no numbers fails every row, and no call."""
        shard = FakeShard(scripts={"broken": Script(error_at=1), f"r{PROBE_ID}": Script(error_at=1)})
        async with running_scheduler(shard, stepwise=False) as h:
            await collect(h.submit("broken", 3, 3))
            assert not await h.scheduler.check_health()
            assert not await h.scheduler.check_health()
            shard.scripts.clear()
            assert await h.scheduler.check_health()

    async def test_the_probe_takes_its_place_among_running_steps(self):
        shard = FakeShard()
        async with running_scheduler(shard, waiting_served_ratio=0.0) as h:
            a = h.submit("a", 3, 8)
            await h.step(1)
            shard.failure = fail_once("Prefill")
            b = h.submit("b", 3, 3)
            await h.step(6)
            health = asyncio.create_task(h.scheduler.check_health())
            await h.finish()
            assert await health
            assert "probe" in h.trace
            assert tokens_of(await collect(a)) == [f"a{i}" for i in range(1, 9)]
            assert isinstance((await collect(b))[-1], Failed)

    async def test_before_the_start_and_after_the_end(self):
        async with running_scheduler(FakeShard()) as h:
            await h.scheduler.drain()
            assert not await h.scheduler.check_health()
