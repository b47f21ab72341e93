"""Two Decodes in flight: what is sent when, and what a finished or abandoned request costs."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_rows import Script
from support.fake_shard import FakeShard
from support.scheduler_harness import collect, running_scheduler, settle, tokens_of

from router.errors import GrammarError, OverloadedError, UnhealthyError, ValidationError


async def test_two_decodes_are_kept_in_flight():
    shard = FakeShard()
    async with running_scheduler(shard) as h:
        h.submit("a", 3, 10)
        await h.step(1)
        assert shard.num_waiting == 2
        await h.step(3)
        assert shard.num_waiting == 2
        assert h.trace == ["P(a)", "D(a)", "D(a)", "D(a)"]


@pytest.mark.parametrize("depth", [1, 3])
async def test_as_many_decodes_are_kept_in_flight_as_the_shards_say(depth: int):
    shard = FakeShard(pipeline_depth=depth)
    async with running_scheduler(shard) as h:
        h.submit("a", 3, 10)
        for _ in range(4):
            await h.step(1)
            assert shard.num_waiting == depth
        assert h.trace == ["P(a)", "D(a)", "D(a)", "D(a)"]


async def test_a_request_that_ends_by_itself_is_never_filtered_and_costs_one_empty_decode():
    shard = FakeShard(scripts={"a": Script(eos_after=3)})
    async with running_scheduler(shard) as h:
        events = h.submit("a", 3, 9)
        await h.finish()
        await settle()
        assert h.trace == ["P(a)", "D(a)", "D(a)", "D()"]
        assert tokens_of(await collect(events)) == ["a1", "a2", "a3"]


async def test_an_end_by_length_is_foreseen():
    async with running_scheduler(FakeShard(), waiting_served_ratio=0.0) as h:
        h.submit("a", 3, 3)
        await h.step(1)
        h.submit("b", 3, 5)
        await h.finish()
        await settle()
        assert h.trace == ["P(a)", "D(a)", "D(a)", "P(b)", *["D(b)"] * 4]


async def test_rows_that_end_leave_by_themselves():
    async with running_scheduler(FakeShard()) as h:
        h.submit("a", 3, 2)
        h.submit("b", 3, 4)
        await h.finish()
        assert h.trace == ["P(a,b)", "D(a,b)", "D(b)", "D(b)"]


async def test_blocks_return_when_the_decode_in_flight_is_answered():
    async with running_scheduler(FakeShard(scripts={"a": Script(eos_after=2)}), max_batch_total_tokens=10) as h:
        allocator = h.scheduler.allocator
        h.submit("a", 3, 4)
        await h.step(1)
        assert allocator.num_free == 3
        await h.step(1)  # the Decode that ends it; a second one is in flight
        assert h.scheduler.num_running == 0
        assert allocator.num_free == 3
        await h.step(1)
        assert allocator.num_free == 9


async def test_a_newcomer_is_prefilled_after_the_decodes_in_flight():
    async with running_scheduler(FakeShard(), waiting_served_ratio=0.0) as h:
        h.submit("a", 3, 20)
        await h.step(2)
        h.submit("b", 3, 20)
        await h.step(4)
        # One Decode ran when it came, a second was in flight.
        assert h.trace == ["P(a)", "D(a)", "D(a)", "D(a)", "P(b)", "D(a,b)"]
        assert h.shard.num_waiting == 2


async def test_waiting_tokens_count_answered_steps():
    async with running_scheduler(FakeShard(), waiting_served_ratio=2.0, max_waiting_tokens=5) as h:
        h.submit("a", 5, 30)
        await h.step(1)
        h.submit("b", 3, 2)
        await h.step(6)
        # Lock-step runs four Decodes first; one more was already in flight.
        assert h.trace == ["P(a)", *["D(a)"] * 5, "P(b)"]


async def test_a_caller_that_leaves_costs_at_most_two_more_tokens():
    async with running_scheduler(FakeShard()) as h:
        a = h.submit("a", 3, 20)
        h.submit("b", 3, 20)
        await h.step(3)
        a.close()
        a.close()
        await h.step(4)
        assert h.trace == ["P(a,b)", *["D(a,b)"] * 4, "F(b)", "D(b)"]
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 1
        assert h.scheduler.num_running == 1


async def test_a_decode_follows_a_filter_without_waiting():
    async with running_scheduler(FakeShard()) as h:
        a = h.submit("a", 3, 20)
        h.submit("b", 3, 20)
        await h.step(3)
        a.close()
        await h.step(1)
        waiting = [rpc for rpc, _ in h.shard.received[-2:]]
        assert waiting == ["FilterBatch", "Decode"]


async def test_the_last_caller_leaves_and_the_batch_is_cleared():
    async with running_scheduler(FakeShard()) as h:
        a = h.submit("a", 3, 20)
        await h.step(3)
        a.close()
        await h.finish()
        assert h.trace == ["P(a)", *["D(a)"] * 4, "C(0)"]
        assert h.shard.batches == {}


async def test_leaving_during_the_prefill_filters_the_new_batch_before_the_merge():
    async with running_scheduler(FakeShard(), waiting_served_ratio=0.0) as h:
        h.submit("a", 3, 20)
        await h.step(2)
        b = h.submit("b", 3, 20)
        h.submit("c", 3, 20)
        await h.step(1)
        b.close()
        await h.step(4)
        assert h.trace == ["P(a)", *["D(a)"] * 3, "P(b,c)", "F(c)", "D(a,c)"]


async def test_leaving_the_running_batch_during_a_prefill_is_settled_before_the_merge():
    async with running_scheduler(FakeShard(), waiting_served_ratio=0.0) as h:
        a = h.submit("a", 3, 20)
        h.submit("b", 3, 20)
        await h.step(2)
        h.submit("c", 3, 20)
        await h.step(2)  # the Prefill of c is on its way
        a.close()
        await h.finish()
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 1
        assert "tgi_request_failure{generation}" not in h.metrics.counts
        assert h.trace[:8] == ["P(a,b)", *["D(a,b)"] * 3, "P(c)", "F(b)", "D(b,c)", "D(b,c)"]


async def test_leaving_and_ending_in_the_same_step_frees_once():
    async with running_scheduler(FakeShard()) as h:
        a = h.submit("a", 3, 2)
        h.submit("b", 3, 9)
        await h.step(1)
        a.close()
        await h.step(1)
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 1


async def test_row_errors_fail_one_request_only():
    shard = FakeShard(scripts={"a": Script(error_at=3), "c": Script(error_at=2, grammar_at_fault=True)})
    async with running_scheduler(shard) as h:
        a, b, c = h.submit("a", 3, 9), h.submit("b", 3, 5), h.submit("c", 3, 5)
        await h.finish()
        refused = (await collect(c))[-1].error
        assert isinstance(refused, GrammarError) and str(refused) == "Input validation error: c went wrong"
        failed = (await collect(a))[-1]
        assert str(failed.error) == "Request failed during generation: Server error: a went wrong"
        assert tokens_of(await collect(b)) == ["b1", "b2", "b3", "b4", "b5"]
        assert h.metrics.counts["tgi_request_failure{generation}"] == 1
        assert all(not step.startswith(("F", "C")) for step in h.trace)


async def test_a_row_that_others_crowd_out_is_an_overload_that_clients_retry():
    async with running_scheduler(FakeShard(scripts={"a": Script(error_at=2, overloaded=True)})) as h:
        a, b = h.submit("a", 3, 5), h.submit("b", 3, 5)
        await h.finish()
        refused = (await collect(a))[-1].error
        assert isinstance(refused, OverloadedError) and refused.retry_after_s == 1 and str(refused) == "a went wrong"
        assert tokens_of(await collect(b)) == ["b1", "b2", "b3", "b4", "b5"]
        assert "tgi_request_failure{generation}" not in h.metrics.counts


async def test_columns_and_rows_of_one_reply_are_both_delivered():
    async with running_scheduler(FakeShard(), stepwise=False) as h:
        a, b = h.submit("a", 3, 4), h.submit("b", 3, 4, top_n_tokens=2)
        assert tokens_of(await collect(a)) == ["a1", "a2", "a3", "a4"]
        assert tokens_of(await collect(b)) == ["b1", "b2", "b3", "b4"]


async def test_a_head_that_waits_for_blocks_is_admitted_when_they_return():
    async with running_scheduler(FakeShard(), max_batch_total_tokens=10, waiting_served_ratio=0.0) as h:
        a = h.submit("a", 3, 7)  # all nine blocks
        b = h.submit("b", 3, 7)
        await h.finish()
        assert h.trace == ["P(a)", *["D(a)"] * 6, "P(b)", *["D(b)"] * 6]
        assert tokens_of(await collect(a)) + tokens_of(await collect(b)) == [
            *(f"a{i}" for i in range(1, 8)),
            *(f"b{i}" for i in range(1, 8)),
        ]


async def test_drain_lets_everything_end_and_refuses_more():
    async with running_scheduler(FakeShard()) as h:
        a = h.submit("a", 3, 4)
        draining = asyncio.create_task(h.scheduler.drain())
        await settle()
        with pytest.raises(UnhealthyError):
            h.submit("b")
        h.shard.run_freely()
        await draining
        assert tokens_of(await collect(a)) == ["a1", "a2", "a3", "a4"]
        assert not await h.scheduler.check_health()


async def test_close_fails_what_is_left():
    async with running_scheduler(FakeShard()) as h:
        a = h.submit("a", 3, 400)
        b = h.submit("b", 4096, 4)
        await h.step(2)
        c = h.submit("c", 3, 4)
        await h.scheduler.close()
        for entry in (a, b, c):
            assert str((await collect(entry))[-1].error) == "unhealthy"


async def test_a_request_that_never_fits_is_refused():
    async with running_scheduler(FakeShard(), max_batch_total_tokens=10) as h:
        h.submit("a", 3, 7)
        for input_length, max_new_tokens in ((3, 8), (5000, 1)):
            with pytest.raises(ValidationError):
                h.submit("b", input_length, max_new_tokens)


async def test_closing_after_the_end_counts_nothing():
    async with running_scheduler(FakeShard(), stepwise=False) as h:
        a = h.submit("a", 3, 4)
        await collect(a)
        a.close()
        await h.finish()
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 0
