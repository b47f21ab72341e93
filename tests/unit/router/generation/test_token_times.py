"""How long a token took, where a step brings one and where it brings several."""

from __future__ import annotations

import pytest
from support.factories import RecordingMetrics, make_request

from router.events import Token, TokenGenerated
from router.generation import running as generation_running
from router.generation.permits import HeldPermits, PermitPool
from router.generation.running import Running
from router.scheduling.delivery import _deliver_row
from router.scheduling.entry import Entry
from router.shards.interface import Ended, Row


async def test_tokens_of_one_step_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr(generation_running.time, "monotonic", lambda: now[0])
    metrics, entry, permit_pool = RecordingMetrics(), Entry(make_request()), PermitPool(1)
    assert permit_pool.acquire(1)
    with HeldPermits(permit_pool, 1, "id") as permits:
        running = Running(entry.request, entry, metrics, permits)
    tokens = [Token(number, "a", -1.0) for number in range(4)]  # type: ignore[arg-type]
    entry.put(TokenGenerated(tokens[0]))
    await running.next_event()
    _deliver_row(Row(1, tokens=tokens[:3]), entry)
    for _ in range(3):
        now[0] += 0.75 if now[0] == 10 else 0.01  # the reader is late for the others: they came with the first
        await running.next_event()
    now[0] = 12.75
    _deliver_row(Row(1, tokens=tokens[:2], ended=Ended("aaaaaa", 6, "length", None)), entry)
    for _ in range(2):
        await running.next_event()
    each = metrics.observed["tgi_request_inter_token_duration"]
    assert each == pytest.approx([0.25] * 3 + [1.0] * 2)
    assert len(metrics.observed["tgi_request_time_to_first_token_duration"]) == 1
