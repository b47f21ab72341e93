"""The order of calls, and the overlap of a job's second half with the next job's first."""

from __future__ import annotations

import contextlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from model_server.engine.device_thread import DeviceThread, Job, whole
from model_server.errors import FatalError, RequestError

WAIT_S = 60.0


@pytest.fixture
def fatal() -> list[BaseException]:
    return []


@pytest.fixture
def gap_limit_s() -> float:
    return 60.0


@pytest.fixture
def device(fatal: list[BaseException], gap_limit_s: float) -> Iterator[DeviceThread]:
    thread = DeviceThread(
        enter=contextlib.nullcontext,
        on_fatal=fatal.append,
        is_fatal=lambda error: isinstance(error, FatalError),
        gap_limit_s=gap_limit_s,
    )
    thread.start()
    yield thread
    thread.stop(WAIT_S)


@pytest.mark.parametrize("seed", range(5))
def test_jobs_run_in_number_order_whatever_their_arrival(device: DeviceThread, seed: int) -> None:
    ran: list[int] = []
    numbers = list(range(40))
    random.Random(seed).shuffle(numbers)
    futures = [device.enqueue(whole(lambda n=n: ran.append(n)), n) for n in numbers]  # type: ignore[misc]
    for future in futures:
        future.result(WAIT_S)
    assert ran == list(range(40))


@pytest.mark.parametrize("gap_limit_s", [0.2])
def test_a_gap_in_the_numbers_ends_the_thread(device: DeviceThread, fatal: list[BaseException]) -> None:
    late = device.enqueue(whole(lambda: None), 1)
    with pytest.raises(FatalError, match="call number 0 did not arrive"):
        late.result(WAIT_S)
    device.stop(WAIT_S)
    assert [type(e) for e in fatal] == [FatalError]
    with pytest.raises(FatalError):
        device.enqueue(whole(lambda: None), 2).result(WAIT_S)


def test_a_number_that_comes_twice_is_refused_and_holds_up_nobody(device: DeviceThread) -> None:
    first = device.enqueue(whole(lambda: "first"), 1)
    second = device.enqueue(whole(lambda: "second"), 1)
    with pytest.raises(RequestError, match="twice"):
        second.result(WAIT_S)
    device.enqueue(whole(lambda: None), 0).result(WAIT_S)
    assert first.result(WAIT_S) == "first"
    assert device.enqueue(whole(lambda: "next"), 2).result(WAIT_S) == "next"


def test_a_number_that_has_passed_is_refused(device: DeviceThread) -> None:
    device.enqueue(whole(lambda: None), 0).result(WAIT_S)
    with pytest.raises(RequestError, match="late"):
        device.enqueue(whole(lambda: None), 0).result(WAIT_S)


def test_a_new_router_starts_its_own_count(device: DeviceThread) -> None:
    stale = device.enqueue(whole(lambda: None), 7)
    device.reset(100)
    with pytest.raises(RequestError, match="another router"):
        stale.result(WAIT_S)
    assert device.enqueue(whole(lambda: "first"), 100).result(WAIT_S) == "first"


def test_an_error_is_answered_and_the_next_job_runs(device: DeviceThread, fatal: list[BaseException]) -> None:
    def fail() -> None:
        raise RequestError("no")

    with pytest.raises(RequestError, match="no"):
        device.enqueue(whole(fail), 0).result(WAIT_S)
    assert device.enqueue(whole(lambda: 5), 1).result(WAIT_S) == 5
    assert fatal == []


def test_a_fatal_error_fails_everything_that_waits(device: DeviceThread, fatal: list[BaseException]) -> None:
    gate = threading.Event()

    def fail() -> None:
        gate.wait(WAIT_S)
        raise FatalError("device lost")

    first = device.enqueue(whole(fail), 0)
    second = device.enqueue(whole(lambda: None), 1)
    gate.set()
    for future in (first, second):
        with pytest.raises(FatalError, match="device lost"):
            future.result(WAIT_S)
    device.stop(WAIT_S)
    assert len(fatal) == 1


def test_a_fatal_error_fails_the_job_that_waits_to_be_submitted(device: DeviceThread) -> None:
    gate, asked = threading.Event(), threading.Event()

    def fail() -> None:
        raise FatalError("device lost")

    def submit() -> Callable[[], None]:
        gate.wait(WAIT_S)
        return fail

    def overlaps() -> bool:
        asked.set()
        return False

    first = device.enqueue(Job(submit), 0)
    second = device.enqueue(Job(lambda: fail, overlaps=overlaps), 1)
    gate.set()
    for future in (first, second):
        with pytest.raises(FatalError, match="device lost"):
            future.result(WAIT_S)
    assert asked.is_set()


def test_a_job_that_comes_while_the_device_works_is_submitted_before_that_is_collected(device: DeviceThread) -> None:
    """As in service: the next call is sent upon an answer, so it is never in the queue already."""
    log: list[str] = []
    working, over = threading.Event(), threading.Event()

    def is_over() -> bool:
        working.set()
        return over.is_set()

    first = device.enqueue(Job(_two_parts(log, "a"), is_over=is_over), 0)
    assert working.wait(WAIT_S) and log == ["submit a"]
    second = device.enqueue(Job(_two_parts(log, "b"), overlaps=lambda: True, is_over=is_over), 1)
    assert first.result(WAIT_S) == "a" and log == ["submit a", "submit b", "collect a"]
    over.set()
    assert second.result(WAIT_S) == "b"


def test_a_job_that_cannot_say_whether_it_is_over_is_collected(device: DeviceThread) -> None:
    def is_over() -> bool:
        raise RuntimeError("device lost")

    assert device.enqueue(Job(_two_parts([], "a"), is_over=is_over), 0).result(WAIT_S) == "a"


def test_a_thread_that_is_to_end_finishes_what_is_on_the_device(device: DeviceThread) -> None:
    working = threading.Event()
    job = Job(_two_parts([], "a"), is_over=lambda: bool(working.set()))
    future = device.enqueue(job, 0)
    assert working.wait(WAIT_S) and device.stop(WAIT_S)
    assert future.result(WAIT_S) == "a"


def test_a_finished_step_holds_nothing(device: DeviceThread) -> None:
    class Memory:
        pass

    watched: list[weakref.ref[Memory]] = []

    def submit() -> Callable[[], bool]:
        memory = Memory()
        watched.append(weakref.ref(memory))
        return lambda: memory is not None

    assert device.enqueue(Job(submit), 0).result(WAIT_S)
    assert device.enqueue(whole(lambda: watched[0]() is None), 1).result(WAIT_S)


def _two_parts(log: list[str], name: str, gate: threading.Event | None = None) -> Callable[[], Callable[[], str]]:
    def submit() -> Callable[[], str]:
        if gate is not None:
            gate.wait(WAIT_S)
        log.append(f"submit {name}")

        def collect() -> str:
            log.append(f"collect {name}")
            return name

        return collect

    return submit


@pytest.mark.parametrize("overlaps", [True, False])
def test_the_next_job_is_submitted_before_the_last_is_collected_only_if_it_says_so(
    device: DeviceThread, overlaps: bool
) -> None:
    log: list[str] = []
    gate = threading.Event()
    first = device.enqueue(Job(_two_parts(log, "a", gate)), 0)
    second = device.enqueue(Job(_two_parts(log, "b"), overlaps=lambda: overlaps), 1)
    gate.set()
    assert (first.result(WAIT_S), second.result(WAIT_S)) == ("a", "b")
    together = ["submit a", "submit b", "collect a", "collect b"]
    assert log == (together if overlaps else ["submit a", "collect a", "submit b", "collect b"])


def test_a_lone_job_is_collected_without_waiting_for_another(device: DeviceThread) -> None:
    log: list[str] = []
    assert device.enqueue(Job(_two_parts(log, "a")), 0).result(WAIT_S) == "a"


def test_a_stage_submits_as_many_steps_as_it_may_and_collects_them_in_order() -> None:
    """Their tokens come from elsewhere: `look` says that they are there."""
    there = threading.Event()
    log: list[str] = []
    full = threading.Event()

    def job(name: str) -> Job[None]:
        def submit() -> Callable[[], None]:
            log.append(f"submit {name}")
            if name == "c":
                full.set()
            return lambda: log.append(f"collect {name}")

        return Job(submit, overlaps=lambda: name != "d", is_over=there.is_set)

    device = DeviceThread(
        contextlib.nullcontext, on_fatal=print, is_fatal=lambda _: False, most_pending=3, look_every_s=WAIT_S
    )
    device.start()
    futures = [device.enqueue(job(name), number) for number, name in enumerate("abc")]
    assert full.wait(WAIT_S)
    there.set()
    device.look()
    for future in futures:
        future.result(WAIT_S)
    there.clear()
    last = device.enqueue(job("d"), 3)
    device.enqueue(whole(lambda: log.append("e")), 4).result(WAIT_S)
    last.result(WAIT_S)
    device.stop(WAIT_S)
    submitted, collected = [f"submit {n}" for n in "abc"], [f"collect {n}" for n in "abc"]
    assert log == [*submitted, *collected, "submit d", "collect d", "e"]
