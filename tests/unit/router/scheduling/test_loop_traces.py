"""The step traces of the scheduler's rules, one call at a time."""

from __future__ import annotations

from support.fake_rows import Script
from support.fake_shard import FakeShard
from support.scheduler_harness import collect, running_scheduler, tokens_of

from router.events import Failed, Finished, TokenGenerated


def in_turn(**changes) -> FakeShard:
    return FakeShard(pipeline_depth=1, **changes)


async def test_one_request_from_queue_to_end():
    async with running_scheduler(in_turn()) as h:
        entry = h.submit("a", 5, 3)
        await h.step(3)
        assert h.trace == ["P(a)", "D(a)", "D(a)"]
        events = await collect(entry)
        assert [type(e) for e in events] == [TokenGenerated, TokenGenerated, Finished]
        assert tokens_of(events) == ["a1", "a2", "a3"]
        last = events[-1]
        assert last.text == " a1 a2 a3"
        assert (last.generated_tokens, last.finish_reason, last.seed) == (3, "length", None)
        assert last.queued_at <= last.started_at


async def test_everything_ends_in_the_same_step_without_filter_or_clear():
    async with running_scheduler(in_turn()) as h:
        h.submit("a", 3, 2)
        h.submit("b", 3, 2)
        await h.step(2)
        assert h.trace == ["P(a,b)", "D(a,b)"]
        assert h.scheduler.num_running == 0
        assert h.shard.num_waiting == 0


async def test_a_request_that_ends_takes_no_part_in_the_next_decode():
    async with running_scheduler(in_turn()) as h:
        h.submit("a", 3, 2)
        h.submit("b", 3, 4)
        await h.finish()
        assert h.trace == ["P(a,b)", "D(a,b)", "D(b)", "D(b)"]


async def test_blocks_of_an_ended_request_serve_the_very_next_admission():
    async with running_scheduler(in_turn(), max_batch_total_tokens=10, waiting_served_ratio=0.3) as h:
        h.submit("a", 3, 2)  # 4 of 9 blocks
        h.submit("b", 3, 3)  # 5
        await h.step(1)
        h.submit("c", 3, 2)
        await h.finish()
        assert h.trace == ["P(a,b)", "D(a,b)", "P(c)", "D(b,c)"]


async def test_a_request_that_ends_in_its_prefill_is_not_merged():
    async with running_scheduler(in_turn(), waiting_served_ratio=0.3) as h:
        h.submit("a", 3, 5)
        await h.step(2)
        h.submit("b", 3, 1)
        h.submit("c", 3, 2)
        await h.finish()
        assert h.trace == ["P(a)", "D(a)", "D(a)", "P(b,c)", "D(a,c)", "D(a)"]


async def test_the_merged_batch_keeps_the_first_id_and_order():
    async with running_scheduler(in_turn(), waiting_served_ratio=0.0) as h:
        h.submit("a", 3, 9)
        await h.step(1)
        h.submit("b", 3, 9)
        await h.step(3)
        assert h.trace == ["P(a)", "D(a)", "P(b)", "D(a,b)"]
        assert list(h.shard.batches) == [0]
        assert h.metrics.observed["tgi_batch_concat_duration{decode}"] == [0.0005]


async def test_k3_a_minimum_below_one_admits_at_once():
    async with running_scheduler(in_turn(), waiting_served_ratio=0.3) as h:
        for name in "abc":
            h.submit(name, 3, 9)
        await h.step(1)
        h.submit("d", 3, 2)
        await h.step(2)
        assert h.trace == ["P(a,b,c)", "D(a,b,c)", "P(d)"]
        assert h.metrics.counts["tgi_batch_concat{backpressure}"] == 1


async def test_k4_waiting_tokens_drop_the_minimum():
    async with running_scheduler(in_turn(), waiting_served_ratio=2.0, max_waiting_tokens=5) as h:
        h.submit("a", 5, 30)
        await h.step(1)
        h.submit("b", 3, 2)
        await h.step(6)
        assert h.trace == ["P(a)", "D(a)", "D(a)", "D(a)", "D(a)", "P(b)", "D(a,b)"]
        assert h.metrics.counts["tgi_batch_concat{wait_exceeded}"] == 1


async def test_k5_the_default_waits_nineteen_decodes():
    async with running_scheduler(in_turn(), waiting_served_ratio=2.0) as h:
        h.submit("a", 5, 30)
        await h.step(1)
        h.submit("b", 3, 2)
        await h.step(20)
        assert h.trace == ["P(a)", *["D(a)"] * 19, "P(b)"]


async def test_k6_a_newcomer_waits_until_enough_others_wait():
    async with running_scheduler(in_turn(), waiting_served_ratio=0.5) as h:
        for name in "abcd":
            h.submit(name, 3, 9)
        await h.step(1)
        await h.step(1)
        h.submit("e", 3, 9)
        await h.step(1)
        h.submit("f", 3, 9)
        await h.step(3)
        assert h.trace[:6] == ["P(a,b,c,d)", *["D(a,b,c,d)"] * 3, "P(e,f)", "D(a,b,c,d,e,f)"]


async def test_k10_the_head_blocks_smaller_requests_behind_it():
    async with running_scheduler(in_turn(), max_batch_total_tokens=24, waiting_served_ratio=0.0) as h:
        for name, length, new in (("a", 6, 5), ("b", 6, 5), ("c", 6, 3), ("d", 1, 2)):
            h.submit(name, length, new)
        await h.finish()
        assert h.trace == ["P(a,b)", *["D(a,b)"] * 4, "P(c,d)", "D(c,d)", "D(c)"]


async def test_k11_max_batch_size_holds_back_until_somebody_leaves():
    async with running_scheduler(in_turn(), max_batch_size=2, waiting_served_ratio=0.0) as h:
        h.submit("a", 3, 4)
        h.submit("b", 3, 2)
        h.submit("c", 3, 2)
        await h.finish()
        assert h.trace == ["P(a,b)", "D(a,b)", "P(c)", "D(a,c)", "D(a)"]


async def test_k12_max_batch_size_holds_on_a_shard_that_could_chunk():
    async with running_scheduler(in_turn(chunking=True), max_batch_size=2, waiting_served_ratio=0.0) as h:
        h.submit("a", 3, 4)
        h.submit("b", 3, 2)
        h.submit("c", 3, 2)
        await h.finish()
        assert h.trace == ["P(a,b)", "D(a,b)", "P(c+a)", "D(a,c)"]


async def test_top_tokens_and_prompt_details_are_delivered_in_order():
    async with running_scheduler(in_turn(), stepwise=False) as h:
        events = await collect(h.submit("a", 3, 2, top_n_tokens=1, decoder_input_details=True))
        assert [type(e).__name__ for e in events] == ["Prefilled", "TokenGenerated", "Finished"]
        assert [t.text for t in events[0].tokens] == ["p"] * 3
        assert [t.text for t in events[2].top_tokens] == [" a2"]


async def test_end_of_sequence_and_seed_are_passed_on():
    from router.request import SamplingParameters

    async with running_scheduler(in_turn(scripts={"a": Script(eos_after=2)}), stepwise=False) as h:
        sampling = SamplingParameters(do_sample=True, seed=2**64 - 1)
        last = (await collect(h.submit("a", 3, 9, sampling=sampling)))[-1]
        assert isinstance(last, Finished)
        assert (last.finish_reason, last.seed, last.generated_tokens) == ("eos_token", 2**64 - 1, 2)


async def test_a_shard_that_forgets_a_request_fails_it():
    shard = in_turn()

    def forget(rpc, response):
        if rpc == "Decode":
            response.ClearField("batch")
            del response.generations[:]
        return response

    async with running_scheduler(shard, stepwise=False) as h:
        shard.edit = forget
        entry = h.submit("a", 3, 5)
        last = (await collect(entry))[-1]
        assert isinstance(last, Failed)
        shard.edit = lambda rpc, response: response
