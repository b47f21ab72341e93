"""The verdict on children that have ended before they were asked to."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.errors import ShardFailed, WebserverFailed
from launcher.other_nodes import Group
from launcher.processes.child import Child, Exit
from launcher.processes.signals import Signals
from launcher.processes.stopping import Stopping
from launcher.processes.timeouts import Timeouts


@pytest.fixture
def stopping() -> Iterator[Stopping]:
    signals = Signals()
    signals.notify(signal.SIGTERM)
    assert signals.take() and not signals.take()
    yield Stopping(signals, Timeouts(graceful_s=1.0))
    signals.close()


def ended(returncode: int, rank: int | None = None) -> Child:
    logs = SimpleNamespace(last_error="", errors=SimpleNamespace(last="", chunks=list))
    name = "router" if rank is None else f"shard {rank}"
    command = SimpleNamespace(rank=rank, name=name)
    child: Any = SimpleNamespace(command=command, title=name, logs=logs, exit=Exit(returncode))
    child.poll = lambda: child.exit
    return cast(Child, child)


def test_a_start_in_which_everybody_was_signalled_is_an_orderly_stop(stopping: Stopping) -> None:
    stopping.in_order([ended(-signal.SIGTERM, 0)], None, Group())


def test_shards_that_were_taken_from_under_a_router_are_named(stopping: Stopping) -> None:
    with pytest.raises(ShardFailed, match="shard 0 was stopped before the last requests were answered"):
        stopping.in_order([ended(-signal.SIGTERM, 0)], ended(1), Group())


def test_a_shard_that_failed_is_named_before_the_router(stopping: Stopping) -> None:
    with pytest.raises(ShardFailed, match="shard 1"):
        stopping.in_order([ended(0, 0), ended(3, 1)], ended(1), Group())


def test_a_router_that_failed_alone_is_named(stopping: Stopping) -> None:
    with pytest.raises(WebserverFailed, match="router"):
        stopping.in_order([], ended(1), Group())
