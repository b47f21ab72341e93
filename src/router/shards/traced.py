"""The shards with spans, if there is a collector: a `batch` per step, the step and calls below it.

A `batch` links to its requests' `infer`; one with a single request belongs to its trace. Calls of no request have none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from router.shards.client import Rpc, ShardClient
from router.shards.interface import CachedBatch, DecodeCall, PrefillCall, Shards, StepReply
from wire.tracing import Tracing, current, end, inside

if TYPE_CHECKING:
    from opentelemetry.trace import Span

_SERVICE = "generate.v3.TextGenerationService"


class TracedClient:
    """A `Client` with a span per call, carried as `traceparent`."""

    def __init__(self, client: ShardClient, tracing: Tracing) -> None:
        self._client = client
        self._tracing = tracing

    def send(self, rpc: Rpc, request: Any, timeout_s: float | None = None) -> Awaitable[Any]:
        span = self._tracing.start(
            f"/{_SERVICE}/{rpc}",
            kind="client",
            parent=current.get(),
            attributes={
                "rpc.system": "grpc", "rpc.service": _SERVICE, "rpc.method": rpc, "net.transport": "unix",
                "server.address": self._client.address,
            },
        )  # fmt: skip
        answer = self._client.send(rpc, request, timeout_s, self._tracing.metadata(span))
        return _Answer(answer, span)

    async def close(self) -> None:
        await self._client.close()


class _Answer:
    """Ends the span with the answer."""

    __slots__ = ("_answer", "_span")

    def __init__(self, answer: Awaitable[Any], span: Span) -> None:
        self._answer = answer
        self._span = span

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            reply = yield from self._answer.__await__()
        except BaseException as error:
            end(self._span, error)
            raise
        end(self._span)
        return reply


class TracedShards:
    """`Shards` with a linked `batch` span per step."""

    def __init__(self, shards: Shards, tracing: Tracing) -> None:
        self._shards = shards
        self._tracing = tracing
        # Batch id → request id → the request's `infer`; kept as the answers say.
        self._members: dict[int, dict[int, Span]] = {}

    def prefill(self, call: PrefillCall) -> asyncio.Future[StepReply]:
        members = {
            one.request_id: one.request.trace.batched() for one in call.batch.requests if one.request.trace is not None
        }
        first_id = call.batch.batch_id
        if call.cached_id is not None:
            first_id = call.cached_id
            members = self._members.pop(first_id, {}) | members
        with _Step(self._tracing, "prefill", members.values()) as step:
            answer = self._shards.prefill(call)
        self._members[first_id] = dict(members)
        return self._watched(step, answer, first_id, members)

    def decode(self, call: DecodeCall) -> asyncio.Future[StepReply]:
        members: dict[int, Span] = {}
        for batch_id in call.batch_ids:
            members |= self._members.pop(batch_id, {})
        with _Step(self._tracing, "decode", members.values()) as step:
            answer = self._shards.decode(call)
        self._members[call.batch_ids[0]] = dict(members)
        return self._watched(step, answer, call.batch_ids[0], members)

    def probe(self) -> asyncio.Future[StepReply]:
        with _Step(self._tracing, "probe", ()) as step:
            answer = self._shards.probe()
        answer.add_done_callback(step.finish)
        return answer

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> asyncio.Future[CachedBatch | None]:
        members = self._members.get(batch_id, {})
        self._members[batch_id] = kept = {one: members[one] for one in request_ids if one in members}
        with _Step(self._tracing, "filter_batch", kept.values()) as step:
            answer = self._shards.filter_batch(batch_id, request_ids)
        answer.add_done_callback(step.finish)
        return answer

    def clear_cache(self, batch_id: int) -> asyncio.Future[None]:
        self._members.pop(batch_id, None)
        with _Step(self._tracing, "clear_cache", ()) as step:
            answer = self._shards.clear_cache(batch_id)
        answer.add_done_callback(step.finish)
        return answer

    async def health(self) -> None:
        await self._shards.health()

    def _watched(
        self, step: _Step, answer: asyncio.Future[StepReply], batch_id: int, sent: Iterable[int]
    ) -> asyncio.Future[StepReply]:
        def answered(done: asyncio.Future[StepReply]) -> None:
            step.finish(done)
            failed = done.cancelled() or done.exception() is not None
            batch = None if failed else done.result().batch
            # For those that took part: others may have joined since the call was sent.
            gone = set(sent) - set(batch.request_ids if batch is not None else ())
            members = self._members.get(batch_id, {})
            for request_id in gone:
                members.pop(request_id, None)
            if not members:
                self._members.pop(batch_id, None)

        answer.add_done_callback(answered)
        return answer


class _Step:
    """The spans of a step, around what is sent."""

    def __init__(self, tracing: Tracing, name: str, requests: Iterable[Span]) -> None:
        linked = list(requests)
        self._batch: Span | None = None
        if linked:  # calls of no request are no batch
            parent = linked[0] if len(linked) == 1 else None
            self._batch = tracing.start("batch", parent=parent, links=linked, attributes={"batch_size": len(linked)})
        self._step = tracing.start(name, parent=self._batch)
        self._inside = inside(self._step)

    def __enter__(self) -> _Step:
        self._inside.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._inside.__exit__(*exception)
        if exception[1] is not None:
            self._end(exception[1])

    def finish(self, answer: asyncio.Future[Any]) -> None:
        self._end(None if answer.cancelled() else answer.exception())

    def _end(self, error: BaseException | None) -> None:
        end(self._step, error)
        if self._batch is not None:
            end(self._batch, error)
