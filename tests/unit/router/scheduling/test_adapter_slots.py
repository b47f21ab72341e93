"""Which requests join where the batches can have only so many adapters at once."""

from __future__ import annotations

from support.factories import make_request
from support.fake_shard import FakeShard
from support.scheduler_harness import Harness, running_scheduler

from router.scheduling.entry import Entry
from router.scheduling.queue.adapter_slots import AdapterSlots, Verdict


def shard(slots: int | None = 2, **changes) -> FakeShard:
    return FakeShard(chunking=True, block_size=4, adapter_slots=slots, pipeline_depth=1, **changes)


def ask(h: Harness, name: str, new: int) -> None:
    """A request whose adapter is the first letter of its name; `-`: the base model."""
    h.submit(name, 3, new, adapter_id=None if name[0] == "-" else name[0])


def prefills(h: Harness) -> list[str]:
    return [call.partition("+")[0].rstrip(")") for call in h.trace if call.startswith("P")]


async def test_a_request_without_a_slot_is_passed_by_the_base_model_and_by_adapters_that_run():
    async with running_scheduler(shard()) as h:
        for name, new in (("a1", 3), ("b1", 30), ("c1", 2), ("a2", 5), ("-1", 2), ("d1", 2)):
            ask(h, name, new)
        await h.finish()
        assert prefills(h) == ["P(a1,b1,a2,-1", "P(c1", "P(d1"]
        joined = next(number for number, call in enumerate(h.trace) if call.startswith("P(c1"))
        before = h.trace[:joined]
        assert sum("a2" in call for call in before) == 5, "c gets the slot of a in the step after the last of a"


async def test_nobody_passes_one_that_has_waited_long():
    async with running_scheduler(shard(), max_waiting_tokens=4) as h:
        for name, new in (("a1", 30), ("b1", 6), ("c1", 2)):
            ask(h, name, new)
        await h.step(2)
        ask(h, "a2", 2)
        await h.step(2)
        assert h.trace[3].startswith("P(a2"), "c has waited three steps"
        ask(h, "a3", 2)
        ask(h, "-1", 2)
        await h.finish()
        assert prefills(h) == ["P(a1,b1", "P(a2", "P(c1,a3,-1"]


async def test_requests_that_wait_keep_their_order():
    async with running_scheduler(shard(1), max_waiting_tokens=100) as h:
        for name in ("a1", "b1", "c1", "b2", "a2", "c2"):
            ask(h, name, 2)
        await h.finish()
        assert prefills(h) == ["P(a1,a2", "P(b1,b2", "P(c1,c2"]


async def test_without_slots_any_number_of_adapters_runs():
    async with running_scheduler(shard(None)) as h:
        for name in "abcdef":
            ask(h, name, 2)
        await h.finish()
        assert prefills(h) == ["P(a,b,c,d,e,f"]


async def test_a_minimum_that_is_not_reached_leaves_the_order_with_those_that_were_passed():
    async with running_scheduler(FakeShard(adapter_slots=1), waiting_served_ratio=3.0, max_waiting_tokens=4) as h:
        ask(h, "a1", 12)
        await h.step(1)
        for name in ("b1", "-1", "c1", "a2"):
            ask(h, name, 1)
        await h.step(2)
        assert prefills(h) == ["P(a1"], "two of the four fit, of three that are asked for"
        await h.finish()
        assert prefills(h)[1:] == ["P(-1,a2", "P(b1", "P(c1"]


async def test_one_that_left_the_queue_is_not_waited_for():
    async with running_scheduler(shard(1), max_waiting_tokens=1) as h:
        ask(h, "a1", 8)
        ask(h, "b1", 2)
        await h.step(3)
        ask(h, "a2", 2)
        await h.step(1)
        assert prefills(h) == ["P(a1"]
        h.entries["b1"].close()
        await h.finish()
        assert prefills(h) == ["P(a1", "P(a2"]


async def test_a_slot_is_not_free_before_the_shards_hear_that_its_request_left():
    """They hear it after a Prefill that joins its batch; meanwhile another micro-batch looks into the queue."""
    async with running_scheduler(shard(1, micro_batches=3)) as h:
        ask(h, "a1", 30)
        ask(h, "-1", 30)
        await h.step(4)
        ask(h, "-2", 30)
        await h.step(1)
        h.entries["a1"].close()
        ask(h, "b1", 2)
        await h.step(8)
        calls = [call for call in h.trace if call.startswith(("F", "P(b1", "P(-2"))]
        assert [call[:4] for call in calls] == ["P(-2", "F(-2", "P(b1"]
        await h.finish()


async def test_which_adapters_run_and_which_wait():
    async with running_scheduler(shard(1)) as h:
        assert h.scheduler.adapters_in_use == (set(), set()) and h.scheduler.most_adapters == 1
        for name, new in (("a1", 3), ("-1", 3), ("b1", 2), ("a2", 2)):
            ask(h, name, new)
        assert h.scheduler.adapters_in_use == (set(), {"a", "b"})
        await h.step()
        assert h.scheduler.adapters_in_use == ({"a"}, {"b"})
        await h.finish()
        assert h.scheduler.adapters_in_use == (set(), set())


async def test_prompts_that_wait_for_a_slot_are_no_backlog():
    """Prompts for more than eight steps of two tokens wait, and a request has ended since."""
    limits = {"max_batch_prefill_tokens": 12, "default_prefill_tokens": 2, "max_waiting_tokens": 100}
    async with running_scheduler(shard(max_prefill_tokens=12), **limits) as h:
        h.submit("a", 1, 30, adapter_id="a")
        h.submit("b", 1, 30, adapter_id="b")
        h.submit("-z", 1, 3)
        await h.step(1)
        for number in range(9):
            ask(h, f"c{number}", 30)
        await h.step(3)
        h.submit("-p", 10, 2)
        await h.step(4)
        assert h.trace[5:] == ["P(-p:4+a,b)", "D(a,b,-p:2)", "D(a,b,-p:2)"]
        for entry in h.entries.values():
            entry.close()


def test_behind_one_that_nobody_passes_any_more_nothing_is_a_backlog():
    """The prompts behind it wait for the slot, too, though their adapter has one."""
    slots = AdapterSlots(1, patience=2)
    running, blocked, behind = (Entry(make_request(name, 3, 2, adapter_id=name[0])) for name in ("a0", "b0", "a1"))
    for num_steps in (0, 1, 2):
        slots.start([running], num_steps)
        assert slots.verdict(blocked) is (Verdict.BLOCKS if num_steps == 2 else Verdict.WAITS)
        assert list(slots.joinable([blocked, behind], 8)) == ([] if num_steps == 2 else [behind])
    assert list(slots.joinable([behind, blocked], 8)) == [behind]


def test_the_waiting_share_the_free_slots():
    slots = AdapterSlots(2, patience=9)
    waiting = [Entry(make_request(name, 3, 2, adapter_id=name[0])) for name in ("a0", "b0", "c0", "b1", "d0", "a1")]
    slots.start([], 0)
    a0, b0, _, b1, _, a1 = waiting
    assert list(slots.joinable(waiting, 8)) == [a0, b0, b1, a1]
    assert list(slots.joinable(waiting, 2)) == [a0, b0, b1], "behind two that are passed the look ends"
    assert slots.verdict(waiting[2]) is Verdict.JOINS, "to count them takes no slot"
