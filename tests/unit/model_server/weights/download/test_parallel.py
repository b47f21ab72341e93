"""Jobs on threads, and what ends them early."""

from __future__ import annotations

import threading

import pytest

from model_server.weights.download.parallel import in_parallel


def test_all_are_done() -> None:
    done: list[int] = []
    in_parallel([lambda n=n: done.append(n) for n in range(20)], 3, threading.Event())
    assert sorted(done) == list(range(20))


def test_the_first_failure_is_raised_and_no_other_begun() -> None:
    stop, others = threading.Event(), threading.Event()
    begun: list[int] = []

    def fail() -> None:
        raise ValueError("no")

    def wait() -> None:
        begun.append(1)
        others.wait(60)

    with pytest.raises(ValueError, match="no"):
        in_parallel([fail, *[wait] * 20], 2, stop)
    assert stop.is_set()
    assert len(begun) <= 1
    others.set()
