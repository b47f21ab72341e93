"""What is counted where a generation ends."""

from __future__ import annotations

import pytest
from support.factories import RecordingMetrics, make_request

from router.errors import GenerationError
from router.events import Failed, Token
from router.generation.permits import HeldPermits, PermitPool
from router.generation.running import Running
from router.scheduling.delivery import _deliver_row
from router.scheduling.entry import Entry
from router.shards.interface import Ended, Row


def running() -> tuple[Running, Entry, RecordingMetrics]:
    metrics, entry, permit_pool = RecordingMetrics(), Entry(make_request()), PermitPool(1)
    assert permit_pool.acquire(1)
    with HeldPermits(permit_pool, 1, "id") as permits:
        return Running(entry.request, entry, metrics, permits), entry, metrics


def ends(metrics: RecordingMetrics) -> dict[str, int]:
    return {name: count for name, count in metrics.counts.items() if name.startswith("tgi_request_finished")}


async def test_a_whole_answer_and_what_the_prefix_cache_had() -> None:
    generation, entry, metrics = running()
    token = Token(1, "a", -1.0)  # type: ignore[arg-type]
    _deliver_row(Row(1, tokens=[token], ended=Ended("a", 1, "stop_sequence", None)), entry)
    await generation.next_event()
    generation.close()
    assert ends(metrics) == {"tgi_request_finished{stop_sequence}": 1}
    assert metrics.counts["tgi_prefix_cache_query_tokens"] == generation.request.input_length
    assert metrics.counts["tgi_prefix_cache_hit_tokens"] == 0


async def test_a_failure_is_no_cancellation() -> None:
    generation, entry, metrics = running()
    entry.put(Failed(GenerationError("no")))
    with pytest.raises(GenerationError):
        await generation.next_event()
    generation.close()
    assert ends(metrics) == {"tgi_request_finished{error}": 1}


async def test_a_client_that_leaves() -> None:
    generation, _, metrics = running()
    generation.close()
    generation.close()
    assert ends(metrics) == {"tgi_request_finished{cancelled}": 1}
