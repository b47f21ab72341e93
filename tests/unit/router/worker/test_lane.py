"""Lanes: cheap jobs first, dear ones in the end, exactly one outcome each, nothing for callers that left."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_fakes import until

from router.errors import OverloadedError
from router.worker import lane as lane_module
from router.worker.lane import Lane


class Gate:
    """A job that occupies a thread until it is opened."""

    def __init__(self) -> None:
        self.begun, self._open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._open.wait(60)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def lane() -> Iterator[Lane]:
    opened = Lane("test", max_waiting_cost=1_000)
    yield opened
    opened.close()


async def occupied(lane: Lane) -> tuple[Gate, asyncio.Task[None]]:
    gate = Gate()
    task = asyncio.create_task(lane.run(0, gate))
    await until(gate.begun.is_set)
    return gate, task


async def queued(lane: Lane, cost: int, work: Callable[[], object]) -> asyncio.Task[object]:
    task: asyncio.Task[object] = asyncio.create_task(lane.run(cost, work))
    await asyncio.sleep(0)
    return task


async def test_cheap_jobs_come_first(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_module, "_COST_OF_A_SECOND", 0.01)
    gate, _ = await occupied(lane)
    done: list[int] = []
    tasks = [await queued(lane, cost, partial(done.append, cost)) for cost in (300, 5, 200, 4, 0)]
    gate.open()
    await asyncio.gather(*tasks)
    assert done == [0, 4, 5, 200, 300]


async def test_a_dear_job_is_not_overtaken_for_ever(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(lane_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(lane_module, "_COST_OF_A_SECOND", 100)
    gate, _ = await occupied(lane)
    done: list[str] = []
    tasks = [await queued(lane, 500, partial(done.append, "dear"))]
    for second in range(10):
        now[0] = second
        tasks.append(await queued(lane, 10, partial(done.append, f"cheap {second}")))
    gate.open()
    await asyncio.gather(*tasks)
    assert done.index("dear") == 5, "its cost is worth five seconds"


async def test_a_caller_that_leaves_takes_a_job_along_that_has_not_begun(lane: Lane) -> None:
    gate, running = await occupied(lane)
    done: list[str] = []
    left = await queued(lane, 900, partial(done.append, "left"))
    stays = await queued(lane, 100, partial(done.append, "stays"))
    with pytest.raises(OverloadedError):
        await lane.run(1, lambda: None)
    left.cancel()
    running.cancel()  # its job goes on
    await asyncio.wait((left, running))
    others = [await queued(lane, 450, partial(done.append, "other")) for _ in range(2)]  # its room is free again
    gate.open()
    await asyncio.gather(stays, *others)
    assert done == ["stays", "other", "other"]


async def test_one_job_may_always_wait(lane: Lane) -> None:
    gate, _ = await occupied(lane)
    large = await queued(lane, 5_000, lambda: "done")
    with pytest.raises(OverloadedError):
        await lane.run(1, lambda: None)
    gate.open()
    assert await large == "done"


async def test_what_a_job_raises(lane: Lane) -> None:
    def fail() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        await lane.run(1, fail)
    assert await lane.run(1, lambda: 5) == 5


async def test_what_is_done_after_each_job_does_not_keep_its_caller_waiting() -> None:
    gate = Gate()
    lane = Lane("test", after_each=gate)
    assert await lane.run(1, lambda: 5) == 5
    await until(gate.begun.is_set)
    gate.open()
    with pytest.raises(KeyError):
        await lane.run(1, lambda: {}[1])
    lane.close()


async def test_closed(lane: Lane) -> None:
    gate, running = await occupied(lane)
    waiting = await queued(lane, 1, lambda: None)
    lane.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate.open()
    await running
    with pytest.raises(RuntimeError):
        await lane.run(1, lambda: None)


@given(
    st.lists(st.tuples(st.integers(0, 200), st.booleans(), st.booleans()), max_size=30),
    st.integers(1, 3),
)
def test_every_job_ends_once(jobs: list[tuple[int, bool, bool]], num_threads: int) -> None:
    """(cost, fails, leaves early): a job runs at most once, every caller that stays has its own outcome."""

    async def play() -> None:
        lane = Lane("test", num_threads=num_threads, max_waiting_cost=2_000)
        begun: list[int] = []

        def work(index: int) -> int:
            begun.append(index)
            if jobs[index][1]:
                raise KeyError(index)
            return index

        tasks = [asyncio.create_task(lane.run(cost, partial(work, i))) for i, (cost, _, _) in enumerate(jobs)]
        await asyncio.sleep(0)
        for task, (_, _, leaves) in zip(tasks, jobs, strict=True):
            if leaves:
                task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert len(begun) == len(set(begun))
        for index, (outcome, (_, fails, leaves)) in enumerate(zip(outcomes, jobs, strict=True)):
            if isinstance(outcome, OverloadedError):
                assert index not in begun
            elif not (leaves and isinstance(outcome, asyncio.CancelledError)):
                assert index in begun
                assert outcome == index if not fails else isinstance(outcome, KeyError) and outcome.args == (index,)
        assert lane._waiting_cost == 0
        lane.close()

    asyncio.run(play())


class Weighty:
    """What a job works on."""


@pytest.mark.parametrize("fails", [False, True])
async def test_what_a_job_worked_on_goes_with_its_outcome(lane: Lane, fails: bool) -> None:
    """Without the garbage collector, which comes late: an exception must not be in a cycle with the job's frames."""

    def weigh(weighty: Weighty) -> str:
        if fails:
            raise ValueError("too heavy")
        return "light"

    weighty = Weighty()
    kept = weakref.ref(weighty)
    job = partial(weigh, weighty)
    del weighty
    gc.disable()
    try:
        with contextlib.suppress(ValueError):
            await lane.run(1, job)
        del job
        await until(lambda: kept() is None)
    finally:
        gc.enable()


async def test_a_job_whose_caller_has_left_ends_as_any_other() -> None:
    ended = threading.Event()
    lane = Lane("test", after_each=ended.set)
    gate, task = await occupied(lane)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    await until(ended.is_set)
    lane.close()
