"""Prompts in chunks, mixed with the tokens of those that run, and failures of a mixed step."""

from __future__ import annotations

import pytest
from support.fake_rows import Script
from support.fake_shard import FakeShard, ShardFailure
from support.scheduler_harness import collect, running_scheduler, settle, tokens_of

from router.errors import GenerationError
from router.events import Failed


def shard(**changes) -> FakeShard:
    return FakeShard(chunking=True, **changes)


async def test_s1_a_prompt_beyond_the_budget_is_computed_in_chunks():
    async with running_scheduler(
        shard(max_prefill_tokens=8), max_batch_prefill_tokens=8, max_batch_total_tokens=64
    ) as h:
        entry = h.submit("a", 20, 3)
        await h.finish()
        assert h.trace == ["P(a:8)", "D(a:8)", "D(a:4)", "D(a)", "D(a)"]
        assert tokens_of(await collect(entry)) == ["a1", "a2", "a3"]


async def test_s2_newcomers_share_a_step_with_those_that_run():
    async with running_scheduler(
        shard(pipeline_depth=1, max_prefill_tokens=8), max_batch_prefill_tokens=8, max_batch_total_tokens=64
    ) as h:
        entries = [h.submit("a", 5, 4), h.submit("b", 10, 2)]
        await h.step(1)
        entries.append(h.submit("c", 3, 2))
        await h.finish()
        assert h.trace == ["P(a,b:3)", "D(a,b:7)", "P(c+a,b)", "D(a,c)"]
        assert [tokens_of(await collect(e)) for e in entries] == [["a1", "a2", "a3", "a4"], ["b1", "b2"], ["c1", "c2"]]
        assert h.metrics.counts["tgi_batch_concat{chunking}"] == 1


async def test_s4_the_older_of_two_long_prompts_gets_the_budget():
    limits = {"max_batch_prefill_tokens": 4096, "max_batch_total_tokens": 60_000, "max_input_tokens": 30_000}
    async with running_scheduler(shard(max_prefill_tokens=4096), **limits) as h:
        for i in range(4):
            h.submit(f"s{i}", 10, 2)
        for i in range(5):
            h.submit(f"t{i}", 10, 50)
        h.submit("a", 20_000, 50)
        await h.step(1)
        h.submit("b", 12_000, 50)
        await h.step(3)
        assert h.trace[0].endswith("a:4006)")
        assert h.trace[1].endswith("a:4087)")
        await h.step(3)
        # It joins in the step that computes the last of the older prompt.
        mixed = next(i for i, step in enumerate(h.trace) if step.startswith("P(b"))
        assert [step.startswith("D(") for step in h.trace[1:mixed]] == [True] * 3
        assert h.trace[mixed].startswith("P(b:358+")
        assert h.trace[mixed].endswith(",a)")
        for entry in h.entries.values():
            entry.close()


@pytest.mark.parametrize(
    ("waiting", "new_tokens", "step"), [(8, 2, "P(b0,b1,b2:1+a)"), (7, 2, "P(b0+a)"), (8, 20, "P(b0+a,z)")]
)
async def test_a_backlog_joins_with_all_that_a_step_may_compute(waiting: int, new_tokens: int, step: str):
    """Prompts for eight steps of the default budget are one, if a request has ended while it waited."""
    limits = {"max_batch_prefill_tokens": 8, "default_prefill_tokens": 3}
    async with running_scheduler(shard(max_prefill_tokens=8), **limits) as h:
        h.submit("a", 1, 20)
        h.submit("z", 1, new_tokens)
        await h.step(1)
        for i in range(waiting):
            h.submit(f"b{i}", 3, 20)
        await h.step(3)
        assert h.trace[3] == step
        for entry in h.entries.values():
            entry.close()


async def test_later_chunks_of_a_prompt_are_as_short_as_its_first():
    limits = {"max_batch_prefill_tokens": 8, "default_prefill_tokens": 3}
    async with running_scheduler(shard(max_prefill_tokens=8), **limits) as h:
        h.submit("a", 1, 20)
        await h.step(1)
        h.submit("b", 10, 2)
        h.submit("c", 4, 2)
        await h.step(7)
        assert h.trace[-5:] == ["P(b:3+a)", "D(a,b:3)", "D(a,b:3)", "P(c:2+a,b)", "D(a,b,c:2)"]
        for entry in h.entries.values():
            entry.close()


async def test_all_chunks_of_a_backlog_are_long():
    limits = {"max_batch_prefill_tokens": 8, "default_prefill_tokens": 3}
    async with running_scheduler(shard(max_prefill_tokens=8), **limits) as h:
        h.submit("a", 1, 2)
        h.submit("z", 1, 20)
        await h.step(1)
        for i in range(3):
            h.submit(f"b{i}", 16, 9)
        await h.step(5)
        assert h.trace[3:6] == ["P(b0:7+z)", "D(z,b0:7)", "P(b1:5+z,b0)"]
        for entry in h.entries.values():
            entry.close()


async def test_a_step_takes_as_many_prompt_tokens_however_many_run():
    limits = {"max_batch_prefill_tokens": 16, "default_prefill_tokens": 3}
    async with running_scheduler(shard(max_prefill_tokens=16), **limits) as h:
        for i in range(6):
            h.submit(f"a{i}", 1, 30)
        await h.step(5)
        h.submit("b", 4, 2)
        await h.step(3)
        assert "P(b:3+a0,a1,a2,a3,a4,a5)" in h.trace
        for entry in h.entries.values():
            entry.close()


async def test_two_steps_are_in_flight_while_a_prompt_fills_them():
    async with running_scheduler(shard(max_prefill_tokens=4), max_batch_prefill_tokens=4) as h:
        h.submit("a", 20, 4)
        await settle()
        in_flight = [h.shard.num_waiting]
        for _ in range(8):
            await h.step(1)
            in_flight.append(h.shard.num_waiting)
        # Others could join the step of the last four tokens: it is sent when no other step is in flight.
        assert in_flight == [2, 2, 2, 1, 2, 2, 2, 1, 0]
        assert h.trace == ["P(a:4)", *["D(a:4)"] * 4, *["D(a)"] * 3]


async def test_others_join_the_last_step_of_a_prompt_if_they_come_before_it_begins():
    async with running_scheduler(shard(max_prefill_tokens=4), max_batch_prefill_tokens=4) as h:
        h.submit("a", 14, 9)
        await h.step(2)
        assert h.shard.num_waiting == 1
        h.submit("b", 2, 9)
        await h.step(2)
        assert h.trace == ["P(a:4)", "D(a:4)", "D(a:4)", "P(b+a)"]


async def test_prompts_that_wait_do_not_hold_up_a_step_that_they_cannot_join():
    async with running_scheduler(shard(max_prefill_tokens=4), max_batch_prefill_tokens=4) as h:
        h.submit("a", 20, 9)
        h.submit("b", 4, 9)
        await settle()
        assert [rpc for rpc, _ in h.shard.received[-2:]] == ["Prefill", "Decode"]
        await h.step(2)
        assert h.shard.num_waiting == 2
        await h.step(4)
        assert h.trace == ["P(a:4)", *["D(a:4)"] * 4, "P(b:3+a)"]


async def test_a_newcomer_joins_after_the_decode_in_flight_and_a_decode_follows_before_its_answer():
    async with running_scheduler(shard()) as h:
        h.submit("a", 3, 20)
        await h.step(2)
        h.submit("b", 3, 20)
        await h.step(1)
        assert [rpc for rpc, _ in h.shard.received[-2:]] == ["Decode", "Prefill"]
        await h.step(1)
        assert [rpc for rpc, _ in h.shard.received[-2:]] == ["Prefill", "Decode"]
        assert (h.trace, h.shard.num_waiting) == (["P(a)", "D(a)", "D(a)", "D(a)"], 2)
        await h.step(2)
        assert h.trace[4:] == ["P(b+a)", "D(a,b)"]


async def test_a_decode_follows_the_first_prefill_before_its_answer():
    async with running_scheduler(shard()) as h:
        h.submit("a", 3, 20)
        await settle()
        assert [rpc for rpc, _ in h.shard.received[-2:]] == ["Prefill", "Decode"]
        await h.finish()
        assert tokens_of(await collect(h.entries["a"])) == [f"a{i}" for i in range(1, 21)]


async def test_prompts_that_wait_go_before_the_decode_after_a_prefill():
    async with running_scheduler(shard(max_prefill_tokens=6), max_batch_prefill_tokens=4) as h:
        for name in "abc":
            h.submit(name, 4, 5)
        await h.step(3)
        assert [step[0] for step in h.trace] == ["P", "P", "P"]
        await h.finish()


async def test_a_gpu_gets_the_decode_after_a_prefill_at_once_even_while_requests_wait():
    async with running_scheduler(shard(max_prefill_tokens=4, device_type="cuda"), max_batch_prefill_tokens=4) as h:
        for name in "abc":
            h.submit(name, 4, 5)
        await settle()
        assert [rpc for rpc, _ in h.shard.received[-2:]] == ["Prefill", "Decode"]
        await h.step(3)
        assert h.trace == ["P(a)", "D(a)", "P(b:3+a)"]
        await h.finish()


@pytest.mark.parametrize(("length", "new_tokens"), [(3, 1), (7, 4)], ids=["its one token", "a prompt but for its end"])
async def test_nothing_follows_a_prefill_of(length: int, new_tokens: int):
    async with running_scheduler(shard(max_prefill_tokens=4), max_batch_prefill_tokens=4) as h:
        h.submit("a", length, new_tokens)
        await settle()
        assert [rpc for rpc, _ in h.shard.received][-1] == "Prefill"
        await h.finish()
        assert len(tokens_of(await collect(h.entries["a"]))) == new_tokens


@pytest.mark.parametrize("running", [False, True])
async def test_a_prefill_that_fails_with_a_decode_behind_it_fails_each_request_once(running: bool):
    shards = shard()
    async with running_scheduler(shards) as h:
        if running:
            h.submit("a", 3, 20)
            await h.step(2)
        shards.failure = lambda rpc, request: ShardFailure("broken") if rpc == "Prefill" else None
        h.submit("b", 3, 20)
        await h.step(4)
        shards.failure = lambda rpc, request: None
        await h.finish()
        for name in h.entries:
            assert isinstance((await collect(h.entries[name]))[-1], Failed)
        assert h.metrics.counts["tgi_request_failure{generation}"] == len(h.entries)
        assert shards.batches == {} and shards.violations == []
        h.submit("c", 3, 4)
        await h.finish()
        assert tokens_of(await collect(h.entries["c"])) == ["c1", "c2", "c3", "c4"]


async def test_a_newcomer_whose_batch_ended_meanwhile_goes_on_alone():
    shards = shard(scripts={"a": Script(eos_after=4)})
    async with running_scheduler(shards) as h:
        h.submit("a", 3, 20)
        await h.step(2)
        b = h.submit("b", 3, 3)
        await h.finish()
        assert h.trace == ["P(a)", "D(a)", "D(a)", "D(a)", "P(b+)", "D(b)", "D(b)"]
        assert tokens_of(await collect(b)) == ["b1", "b2", "b3"]


async def test_max_batch_size_holds_with_chunks_too():
    async with running_scheduler(shard(), max_batch_size=2) as h:
        for name in "abc":
            h.submit(name, 3, 4)
        await h.finish()
        assert h.trace[0] == "P(a,b)"
        assert all(step.count(",") < 2 for step in h.trace)


async def test_leaving_while_a_newcomer_joins_is_settled_after_the_join():
    async with running_scheduler(shard()) as h:
        a = h.submit("a", 3, 20)
        await h.step(2)
        h.submit("b", 3, 4)
        h.submit("c", 3, 20).close()
        await h.step(1)  # the Prefill of b and c is on its way
        a.close()
        await h.finish()
        assert h.trace[:5] == ["P(a)", "D(a)", "D(a)", "D(a)", "P(b+a)"]
        assert "F(b)" in h.trace
        assert h.metrics.counts["tgi_request_failure{dropped}"] == 2


async def test_everybody_leaves_during_the_join():
    async with running_scheduler(shard()) as h:
        a = h.submit("a", 3, 20)
        await h.step(2)
        b = h.submit("b", 3, 20)
        await h.step(1)
        a.close()
        b.close()
        await h.finish()
        assert h.trace[-1] == "C(0)"
        assert h.shard.batches == {}


async def test_leaving_in_the_middle_of_a_prompt_frees_at_once():
    async with running_scheduler(shard(max_prefill_tokens=4), max_batch_prefill_tokens=4) as h:
        a = h.submit("a", 40, 9)
        await h.step(3)
        a.close()
        await h.finish()
        assert h.trace == ["P(a:4)", *["D(a:4)"] * 4, "C(0)"]


@pytest.mark.parametrize("joins", [False, True])
async def test_a_prompt_that_is_given_up_makes_room_at_once(joins: bool):
    async with running_scheduler(shard(max_prefill_tokens=4), max_batch_prefill_tokens=4) as h:
        if joins:
            h.submit("a", 2, 30)
            await h.step(2)
        left = h.submit("b", 40, 9)
        h.submit("c", 2, 9)
        await h.step(2 + joins)
        left.close()
        await h.step(4)
        assert [step[0] for step in h.trace[-3:]] == (["D", "F", "P"] if joins else ["D", "C", "P"])


async def test_f2_a_failed_mixed_step_fails_both_and_clears_both_ids():
    shards = shard()
    async with running_scheduler(shards) as h:
        a = h.submit("a", 3, 20)
        await h.step(2)
        b = h.submit("b", 3, 20)
        shards.failure = lambda rpc, request: ShardFailure("boom") if rpc == "Prefill" else None
        await h.step(3)
        for entry in (a, b):
            failed = (await collect(entry))[-1]
            assert isinstance(failed, Failed) and isinstance(failed.error, GenerationError)
        shards.failure = lambda rpc, request: None
        c = h.submit("c", 3, 2)
        await h.finish()
        assert h.trace[-4:] == ["C(0)", "C(1)", "P(c)", "D(c)"]
        assert tokens_of(await collect(c)) == ["c1", "c2"]
        assert h.metrics.counts["tgi_request_failure{generation}"] == 2


async def test_newcomers_of_a_batch_that_failed_before_they_joined_are_prefilled_again():
    shards = shard()
    async with running_scheduler(shards) as h:
        a = h.submit("a", 3, 20)
        await h.step(2)
        b, c = h.submit("b", 3, 3), h.submit("c", 3, 3)
        await h.step(1)  # a Decode of a is in flight, and after it the Prefill of b and c
        d = h.submit("d", 3, 3)
        shards.failure = lambda rpc, request: ShardFailure("boom") if rpc == "Decode" else None
        await h.step(1)
        shards.failure = lambda rpc, request: None
        await h.finish()
        assert isinstance((await collect(a))[-1], Failed)
        assert [tokens_of(await collect(e)) for e in (b, c, d)] == [[f"{n}{i}" for i in (1, 2, 3)] for n in "bcd"]
        assert "P(b,c,d)" in h.trace
        assert h.metrics.counts["tgi_request_failure{generation}"] == 1


async def test_newcomers_that_joined_a_batch_which_only_the_router_knows_failed_are_prefilled_again():
    shards = [shard(rank=rank, world_size=2) for rank in range(2)]
    decodes = 0

    def disagree(rpc, response):
        nonlocal decodes
        decodes += rpc == "Decode"
        if rpc == "Decode" and decodes == 2:
            del response.batch.request_ids[:]
        return response

    shards[1].edit = disagree
    async with running_scheduler(*shards) as h:
        a = h.submit("a", 2, 9)
        await h.step(1)
        b = h.submit("b", 2, 5)
        await h.step(1)  # its Prefill is on its way after the Decode of which the ranks will disagree
        await h.finish()
        assert isinstance((await collect(a))[-1], Failed)
        assert tokens_of(await collect(b)) == [f"b{i}" for i in range(1, 6)]
        assert h.trace[2:7] == ["D(a)", "P(b+a)", "C(0)", "D()", "P(b)"]


async def test_a_prompt_longer_than_the_budget_is_accepted_with_chunks_only():
    async with running_scheduler(shard(), max_batch_prefill_tokens=8) as h:
        assert h.scheduler.can_ever_fit(100, 10)
    async with running_scheduler(FakeShard(), max_batch_prefill_tokens=8) as h:
        assert not h.scheduler.can_ever_fit(100, 10)


async def test_an_end_by_length_is_foreseen_after_a_join():
    async with running_scheduler(shard()) as h:
        h.submit("a", 3, 4)
        await h.step(1)
        h.submit("b", 3, 2)
        await h.finish()
        await settle()
        # Nobody is asked for a token beyond the last.
        assert h.trace == ["P(a)", "D(a)", "D(a)", "P(b+a)", "D(b)"]
