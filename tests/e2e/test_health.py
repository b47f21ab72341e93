"""`/health` is the truth: not before every shard has generated, and whatever the load."""

from __future__ import annotations

import http.client
import threading
import time

import pytest
from support.effort import examples
from support.launched import Stream, Unary, served, streams
from support.running_server import START_LIMIT_S, RunningServer, running_server

pytestmark = pytest.mark.e2e

PROBES = examples(50, 100)


@pytest.mark.long
def test_unhealthy_until_every_shard_has_generated() -> None:
    with running_server("demo", "--num-shard", "2", wait=False) as server:
        deadline = time.monotonic() + START_LIMIT_S
        before: set[int | None] = set()
        while (status := server.health_status()) != 200:
            before.add(status)
            assert server.process.poll() is None and time.monotonic() < deadline, server.log()
            time.sleep(0.01)
        # Written by a rank when it has run the largest prompt and a step after it.
        assert server.log().count("warm-up took ") == 2
        assert before <= {None, 503}
        assert server.stop() == 0


class Prober:
    """One client that asks again and again over one connection."""

    def __init__(self, server: RunningServer, count: int) -> None:
        self.statuses: list[int] = []
        self._port, self._count = server.port, count
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        for _ in range(self._count):
            connection.request("GET", "/health")
            answer = connection.getresponse()
            answer.read()
            self.statuses.append(answer.status)
        connection.close()


@pytest.mark.long
def test_health_is_answered_while_nothing_else_is_let_in() -> None:
    """A flood of probes beside requests that hold every permit: none is refused, none waits for a generation, and none
    is counted as a request."""
    with served("--max-concurrent-requests", "2") as (server, _):
        running = streams(server, 2)
        refused = Unary(server, 1)
        assert refused.ended.wait(60) and refused.status == 429
        first = Prober(server, 5)
        first.thread.join(120)
        assert first.statuses == [200] * 5
        assert not all(stream.ended.is_set() for stream in running), "probes wait for generations"
        probers = [Prober(server, PROBES // 10) for _ in range(10)]
        for prober in probers:
            prober.thread.join(120)
            assert prober.statuses == [200] * (PROBES // 10)


def test_health_is_answered_while_a_long_prompt_is_computed(server: RunningServer) -> None:
    long = Stream(server, 1, prompt="word " * 3000)
    prober = Prober(server, 50)
    prober.thread.join(120)
    assert prober.statuses == [200] * 50
    assert long.ended.wait(120) and long.is_complete
