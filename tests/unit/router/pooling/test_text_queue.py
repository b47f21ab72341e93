"""The queue of texts and the steps that are made of it: turns, budgets, long texts, clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from router.metrics import PoolingMetrics
from router.pooling.errors import PoolingError
from router.pooling.queue import Entry, TextQueue
from router.pooling.scheduler import PooledScheduler
from router.pooling.texts import Tokens
from router.shards.interface import ShardError
from router.shards.pooling import Numbers, StepAnswer, TextItem


def entry(*lengths: int) -> Entry:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    tokens = [Tokens(list(range(length))) for length in lengths]
    return Entry(tokens=tokens, kind="POOLED", dimensions=0, normalize=True, done=done)


def lengths_of(queue: TextQueue) -> list[int]:
    return [len(unit.tokens.ids) for unit in queue.next_step()]


async def test_requests_take_turns() -> None:
    queue = TextQueue(budget=10)
    many, one = entry(*[3] * 6), entry(2)
    queue.add(many)
    queue.add(one)
    first = queue.next_step()
    assert [unit.entry for unit in first] == [many, one, many] and queue.num_texts == 4
    assert lengths_of(queue) == [3, 3, 3] and lengths_of(queue) == [3] and lengths_of(queue) == []
    assert (queue.num_tokens, queue.num_texts) == (0, 0)


async def test_a_text_above_the_budget_is_a_step_of_its_own_and_nothing_overtakes_it() -> None:
    queue = TextQueue(budget=10)
    queue.add(entry(4, 25, 4))
    assert [lengths_of(queue) for _ in range(3)] == [[4], [25], [4]]


async def test_the_number_of_texts_is_bounded() -> None:
    queue = TextQueue(budget=100, max_size=2)
    queue.add(entry(1, 1, 1))
    assert lengths_of(queue) == [1, 1]


async def test_what_a_client_leaves_behind_is_not_computed() -> None:
    queue = TextQueue(budget=4)
    gone, other = entry(3, 3), entry(3)
    queue.add(gone)
    queue.add(other)
    assert lengths_of(queue) == [3]
    queue.remove(gone)
    queue.remove(gone)
    assert (queue.num_tokens, queue.num_texts) == (3, 1)
    assert [unit.entry for unit in queue.next_step()] == [other]


class Shards:
    """Answers each step when it is told to, with the length of each text."""

    def __init__(self) -> None:
        self.steps: list[tuple[Sequence[TextItem], asyncio.Future[StepAnswer]]] = []
        self.failure: ShardError | None = None

    def run_texts(self, items: Sequence[TextItem]) -> asyncio.Future[StepAnswer]:
        future: asyncio.Future[StepAnswer] = asyncio.get_running_loop().create_future()
        self.steps.append((items, future))
        return future

    async def health(self) -> None:
        if self.failure is not None:
            raise self.failure

    def answer(self, number: int, error: str | None = None) -> None:
        items, future = self.steps[number]
        numbers = {item.id: Numbers(np.array([len(item.ids)], dtype=np.float32), error=error) for item in items}
        future.set_result(StepAnswer(numbers, 0.001, (0.0, 0.001, 0.0, 0.0)))


def scheduler_on(shards: Shards, budget: int = 10) -> PooledScheduler:
    return PooledScheduler(shards, PoolingMetrics(64), budget=budget)


async def test_two_steps_are_under_way_and_each_text_gets_its_own_answer() -> None:
    shards = Shards()
    scheduler = scheduler_on(shards)
    first = asyncio.ensure_future(scheduler.compute(entry(4, 5, 6, 7)))
    second = asyncio.ensure_future(scheduler.compute(entry(8)))
    await asyncio.sleep(0)
    assert [[len(item.ids) for item in items] for items, _ in shards.steps] == [[4, 5], [6]]
    shards.answer(1)
    await asyncio.sleep(0.01)
    shards.answer(0)
    await asyncio.sleep(0.01)
    for number in range(2, len(shards.steps)):
        shards.answer(number)
        await asyncio.sleep(0.01)
    assert [float(one.values[0]) for one in await first] == [4, 5, 6, 7]
    assert [float(one.values[0]) for one in await second] == [8]


async def test_one_texts_error_is_its_requests_and_no_others() -> None:
    shards = Shards()
    scheduler = scheduler_on(shards, budget=3)
    bad, good = asyncio.ensure_future(scheduler.compute(entry(3, 3, 3))), None
    await asyncio.sleep(0)
    good = asyncio.ensure_future(scheduler.compute(entry(2)))
    await asyncio.sleep(0)
    shards.answer(0, error="not finite")
    with pytest.raises(PoolingError, match="not finite"):
        await bad
    assert scheduler.queue.num_texts <= 1, "the rest of the request is not computed"
    for number in range(1, 4):
        await asyncio.sleep(0.01)
        if number < len(shards.steps):
            shards.answer(number)
    assert [float(one.values[0]) for one in await good] == [2]


async def test_a_caller_that_is_cancelled_leaves_nothing_behind() -> None:
    shards = Shards()
    scheduler = scheduler_on(shards, budget=3)
    gone = asyncio.ensure_future(scheduler.compute(entry(3, 3, 3, 3)))
    await asyncio.sleep(0)
    gone.cancel()
    await asyncio.sleep(0.01)
    assert (scheduler.queue.num_texts, scheduler.queue.num_tokens) == (0, 0)
    shards.answer(0)
    shards.answer(1)
    await asyncio.sleep(0.01)
    assert len(shards.steps) == 2


async def test_a_lost_shard_fails_all_requests_and_ends_the_scheduler() -> None:
    shards = Shards()
    scheduler = scheduler_on(shards, budget=3)
    running = asyncio.ensure_future(scheduler.run())
    waiting = [asyncio.ensure_future(scheduler.compute(entry(3))) for _ in range(4)]
    await asyncio.sleep(0)
    shards.steps[0][1].set_exception(ShardError("the model server cannot be reached", fatal=True))
    for one in waiting:
        with pytest.raises(PoolingError, match="cannot be reached"):
            await one
    await running
    assert isinstance(scheduler.failure, ShardError) and not await scheduler.check_health()
    with pytest.raises(PoolingError, match="stopping"):
        await scheduler.compute(entry(1))


async def test_a_shard_that_is_gone_ends_steps_that_wait_for_another_one_only() -> None:
    shards = Shards()
    scheduler = scheduler_on(shards)
    running = asyncio.ensure_future(scheduler.run())
    waiting = asyncio.ensure_future(scheduler.compute(entry(3)))
    await asyncio.sleep(0)
    await scheduler.end_if_unreachable()
    shards.failure = ShardError("slow", fatal=True)
    await scheduler.end_if_unreachable()
    assert scheduler.failure is None
    shards.failure = ShardError("gone", fatal=True, unreachable=True)
    await scheduler.end_if_unreachable()
    with pytest.raises(PoolingError, match="gone"):
        await waiting
    await running
    assert scheduler.failure is shards.failure
