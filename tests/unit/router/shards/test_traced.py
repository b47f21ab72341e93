"""Spans of steps and calls, over real sockets: links, parents, metadata; and what outlives a request (nothing)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from support.factories import RecordingMetrics, make_limits, make_request
from support.fake_shard import FakeShard
from support.fake_shard_server import serve
from support.recorded_spans import RecordedSpans, id_of, linked_of, parent_of
from support.scheduler_harness import collect

from router.generation_trace import GenerationTrace
from router.scheduling.loop import Scheduler
from router.shards.client import ShardClient
from router.shards.interface import CachedBatch, DecodeCall, NewBatch, NewRequest, PrefillCall, ShardError, StepReply
from router.shards.pool import ShardPool
from router.shards.traced import TracedClient, TracedShards
from router.shards.warm_up import WarmUpPlan
from wire.v3 import generate_pb2 as pb

PLAN = WarmUpPlan(max_input_tokens=None, max_prefill_tokens=64, max_total_tokens=None, max_batch_size=None)


@pytest.fixture
def recorded() -> RecordedSpans:
    return RecordedSpans()


@pytest.fixture
def shards() -> list[FakeShard]:
    return [FakeShard(rank=rank, world_size=2) for rank in range(2)]


@pytest.fixture
async def pool(tmp_path: Path, shards: list[FakeShard], recorded: RecordedSpans) -> AsyncIterator[ShardPool]:
    async with serve(*shards, prefix=str(tmp_path / "shard")) as path:
        made = await ShardPool.discover(path, lambda url: TracedClient(ShardClient(url), recorded.tracing))
        await made.clear_all()
        yield made
        await made.close()


def traced_request(recorded: RecordedSpans, name: str, max_new_tokens: int = 4):
    root = recorded.tracing.start(f"root-{name}")
    trace = GenerationTrace(recorded.tracing, root)
    return replace(make_request(name, 1, max_new_tokens), trace=trace), trace


async def test_a_batch_is_linked_to_its_requests(pool, recorded):
    info = await pool.info()
    await pool.warm_up(PLAN)
    traced = TracedShards(pool, recorded.tracing)
    scheduler = Scheduler(traced, info, make_limits(), RecordingMetrics())
    task = asyncio.ensure_future(scheduler.run())
    requests = [traced_request(recorded, name) for name in "ab"]
    entries = [scheduler.submit(request) for request, _ in requests]
    events = [await collect(entry) for entry in entries]
    assert [len(one) for one in events] == [4, 4]
    for _, trace in requests:
        trace.finish()
    await scheduler.close()
    await task
    infer = {id_of(span) for span in recorded.named("infer")}
    assert len(infer) == 2 and len(recorded.named("queued")) == 2
    prefill = recorded.one("prefill")
    batches = {id_of(span): span for span in recorded.named("batch")}
    batch = batches[parent_of(prefill)]
    assert linked_of(batch) == infer and parent_of(batch) == 0 and batch.attributes["batch_size"] == 2
    for step in recorded.named("decode"):
        assert linked_of(batches[parent_of(step)]) <= infer
    calls = recorded.named("/generate.v3.TextGenerationService/Prefill")
    assert [parent_of(call) for call in calls] == [id_of(prefill)] * 2, "one for each rank"
    assert calls[0].attributes["rpc.method"] == "Prefill" and calls[0].kind.name == "CLIENT"
    assert traced._members == {}


async def test_a_batch_of_one_belongs_to_its_request(pool, recorded):
    traced = TracedShards(pool, recorded.tracing)
    request, trace = traced_request(recorded, "a", 2)
    batch = NewBatch(1, [NewRequest(0, request, [1, 2])])
    await traced.prefill(PrefillCall(batch))
    assert [linked_of(span) for span in recorded.named("batch")] == [{id_of(trace.batched())}]
    assert parent_of(recorded.one("batch")) == id_of(trace.batched())
    await traced.decode(DecodeCall([1]))
    assert traced._members == {}, "the shards have said that nothing is left"


async def test_what_joins_while_a_step_runs_is_kept(recorded):
    """The answer of a step speaks only of those that took part in it."""
    answers: list[asyncio.Future] = []

    class Shards:
        def prefill(self, *_):
            answers.append(asyncio.get_running_loop().create_future())
            return answers[-1]

        decode = prefill

    traced = TracedShards(Shards(), recorded.tracing)
    for batch_id, name in ((1, "a"), (2, "b")):
        request, _ = traced_request(recorded, name)
        traced.prefill(PrefillCall(NewBatch(batch_id, [NewRequest(batch_id, request)])))
    traced.decode(DecodeCall([1]))
    traced.decode(DecodeCall([1, 2]))
    answers[2].set_result(StepReply(batch=None))  # of the first decode: the only request has ended
    await asyncio.sleep(0)
    assert set(traced._members[1]) == {2}
    answers[3].set_result(StepReply(batch=CachedBatch(1, [2], 1, 1)))
    await asyncio.sleep(0)
    assert set(traced._members[1]) == {2}


async def test_a_failure_shows_in_all_spans_of_the_step(pool, shards, recorded):
    traced = TracedShards(pool, recorded.tracing)
    traced._members[77] = {0: traced_request(recorded, "a")[1].batched()}
    with pytest.raises(ShardError):
        await traced.decode(DecodeCall([77]))
    for name in ("batch", "decode"):
        assert recorded.one(name).status.description == "ShardError"
    assert traced._members == {}


async def test_calls_of_no_request_are_no_batch(pool, recorded):
    """A decode that was sent ahead, of requests that have ended since, among them."""
    traced = TracedShards(pool, recorded.tracing)
    await traced.clear_cache(5)
    with pytest.raises(ShardError):
        await traced.decode(DecodeCall([5]))
    assert parent_of(recorded.one("clear_cache")) == parent_of(recorded.one("decode")) == 0
    assert recorded.named("batch") == []


async def test_every_call_carries_its_context(tmp_path, recorded):
    seen: list[tuple[str, str]] = []

    class Interceptor(grpc.aio.ServerInterceptor):
        async def intercept_service(self, continuation, details):
            seen.append((details.method, dict(details.invocation_metadata)["traceparent"]))
            return await continuation(details)

    server = grpc.aio.server(interceptors=[Interceptor()])
    path = f"unix:{tmp_path}/x"
    server.add_insecure_port(path)
    await server.start()
    client = TracedClient(ShardClient(path.removeprefix("unix:")), recorded.tracing)
    with pytest.raises(ShardError):
        await client.send("Health", pb.HealthRequest(), 5.0)
    await client.close()
    await server.stop(None)
    (span,) = recorded.all()
    trace_id, span_id = span.get_span_context().trace_id, id_of(span)
    ((method, traceparent),) = seen
    assert method == span.name and traceparent.startswith(f"00-{trace_id:032x}-{span_id:016x}-")
    assert span.status.description == "ShardError"
