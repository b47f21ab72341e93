"""A rank learns at once that a peer's process has ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from model_server.distributed.peer_watch import Identity, PeerWatch

SOON = 20.0


@pytest.fixture
def peer() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process
        process.kill()


def identity(process: subprocess.Popen[bytes]) -> Identity:
    return replace(Identity.own(), pid=process.pid)


def watching(
    peers: dict[int, Identity], *, orderly_s: float = 0.01, leave_limit_s: float = 60.0
) -> tuple[PeerWatch, threading.Event]:
    left = threading.Event()
    return PeerWatch(0, peers, leave=left.set, orderly_s=orderly_s, leave_limit_s=leave_limit_s), left


def test_an_identity_travels_as_text() -> None:
    own = Identity.own()
    assert Identity.decode(own.encode()) == own
    assert own.space


def test_a_rank_that_still_loads_leaves_at_once(
    peer: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    watch, left = watching({3: identity(peer)})
    watch.start()
    assert watch.lost() is None and not left.is_set()
    peer.kill()
    assert left.wait(SOON)
    assert watch.lost() == "rank 3"
    assert [record.message for record in caplog.records] == ["rank 0 lost rank 3: its process has exited"]
    watch.close()


def test_one_that_serves_is_told_and_may_end_in_order(peer: subprocess.Popen[bytes]) -> None:
    watch, left = watching({1: identity(peer), 2: Identity.own()})
    told: list[str] = []
    heard = threading.Event()

    def on_lost(message: str) -> None:
        told.append(message)
        watch.close()
        heard.set()

    watch.on_lost = on_lost
    watch.start()
    peer.kill()
    assert heard.wait(SOON)
    assert told == ["rank 0 lost rank 1: its process has exited"]
    assert not left.is_set()


def test_one_that_does_not_end_in_order_leaves_all_the_same(peer: subprocess.Popen[bytes]) -> None:
    watch, left = watching({1: identity(peer)}, leave_limit_s=0.01)
    watch.on_lost = lambda message: None
    watch.start()
    peer.kill()
    assert left.wait(SOON)
    watch.close()


def test_a_peer_that_ends_in_a_stop_of_all_is_no_loss(peer: subprocess.Popen[bytes]) -> None:
    watch, left = watching({1: identity(peer)}, orderly_s=60.0)
    watch.start()
    peer.kill()
    assert watch.lost(SOON) == "rank 1"
    watch.close()
    assert not left.is_set()


def test_a_peer_that_was_gone_before_the_watch(peer: subprocess.Popen[bytes]) -> None:
    peer.kill()
    peer.wait()
    watch, left = watching({1: identity(peer)})
    watch.start()
    assert left.wait(SOON)
    watch.close()


def test_peers_elsewhere_are_not_watched() -> None:
    watch, left = watching({1: Identity(1, "another machine")})
    watch.start()
    assert watch.lost(0.0) is None
    watch.close()
    watch.close()
    assert not left.is_set()
