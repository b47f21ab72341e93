"""A shard whose forward costs nothing, or takes an exact time: the true protocol of `generate.v3`, and no model.

Steps are executed one after another in the router's order. A step that takes time is slept through on one thread, as a
device would work: a call that has arrived before the step ahead of it ends leaves no gap, whatever the sleep overshot.
With the argument `chunks` a Prefill computes the next tokens of the running batch too. With `ranks=4` it is four ranks,
each on a socket of its own: a step begins when its call has come to all of them, and each answers for its share of the
requests. With `endpoints=2` the router reaches them through two endpoints, each of which passes calls on to half of
them. With `stages=2` a step passes through two stages, each of which may work on another step meanwhile.
"""

from __future__ import annotations

import asyncio
import ctypes
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from benchmarks.router.child import Handler, free_port, run_child
from model_server.rpc.endpoint import Endpoint, EndpointPlan
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb

SERVICE = "generate.v3.TextGenerationService"
BLOCK_SIZE = 16
_MAX_TRACED = 200_000
_PR_SET_TIMERSLACK = 29


@dataclass
class Prompt:
    """A row without its first token: what is left of its prompt, and how much of that the next step computes."""

    left: int
    chunk: int
    max_new_tokens: int


@dataclass
class Batch:
    """Rows of one batch: request id → the step after which it has all its tokens."""

    batch_id: int
    step: int = 0
    ends: dict[int, int] = field(default_factory=dict)
    prompts: dict[int, Prompt] = field(default_factory=dict)
    next_end: int = 0
    answer: bytes = b""  # of every step until the next row ends

    def changed(self) -> None:
        self.next_end = min(self.ends.values(), default=0)
        self.answer = b""


class Rows:
    """The batches as one rank sees them; every method returns its answer in bytes."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.batches: dict[int, Batch] = {}
        self._rank, self._num_ranks = rank, num_ranks

    def prefill(self, request: pb.PrefillRequest) -> bytes:
        new = Batch(request.batch.id)
        for r in request.batch.requests:
            max_new_tokens = r.stopping_parameters.max_new_tokens - len(r.resume_ids)
            if r.HasField("chunk_len"):
                left = len(r.input_ids) + len(r.resume_ids) - r.cache_len
                new.prompts[r.id] = Prompt(left, r.chunk_len, max_new_tokens)
            else:
                new.ends[r.id] = max_new_tokens
        new.changed()
        self.batches[new.batch_id] = new
        if request.HasField("cached_id"):
            return self._step(self._merged([request.cached_id, new.batch_id]), request.chunk_tokens)
        return self._step(new, request.chunk_tokens)

    def decode(self, request: pb.DecodeRequest) -> bytes:
        return self._step(self._merged(list(request.batch_ids)), request.chunk_tokens)

    def filter(self, request: pb.FilterBatchRequest) -> bytes:
        batch = self.batches.get(request.batch_id)
        if batch is None:
            return b""
        kept = set(request.request_ids)
        batch.ends = {request_id: end for request_id, end in batch.ends.items() if request_id in kept}
        batch.prompts = {request_id: prompt for request_id, prompt in batch.prompts.items() if request_id in kept}
        batch.changed()
        if not (batch.ends or batch.prompts):
            del self.batches[batch.batch_id]
            return b""
        return bytes(pb.FilterBatchResponse(batch=_kept(batch)).SerializeToString())

    def clear(self, request: pb.ClearCacheRequest) -> bytes:
        if request.HasField("id"):
            self.batches.pop(request.id, None)
        else:
            self.batches.clear()
        return b""

    def _merged(self, ids: list[int]) -> Batch | None:
        found = [batch for batch_id in ids if (batch := self.batches.get(batch_id)) is not None]
        if not found:
            return None
        first, *others = found
        for other in others:
            first.ends.update({row: end - other.step + first.step for row, end in other.ends.items()})
            first.prompts.update(other.prompts)
            del self.batches[other.batch_id]
        if others:
            first.changed()
        return first

    def _step(self, batch: Batch | None, chunk_tokens: int) -> bytes:
        if batch is None:
            return b""
        batch.step += 1
        if batch.prompts:
            _compute_chunks(batch, chunk_tokens)
        elif batch.step < batch.next_end:
            if not batch.answer:
                batch.answer = self._answer(batch, [])
            return batch.answer
        ended = [row for row, end in batch.ends.items() if end <= batch.step]
        for row in ended:
            del batch.ends[row]
        batch.changed()
        answer = self._answer(batch, ended)
        if not (batch.ends or batch.prompts):
            del self.batches[batch.batch_id]
        return answer

    def _answer(self, batch: Batch, ended: list[int]) -> bytes:
        rows = [row for row in batch.ends if self._owns(row)]
        ids = [1000 + row % 1000 for row in rows]
        response = pb.DecodeResponse(forward_ns=1_000_000, decode_ns=100_000, total_ns=1_100_000)
        if rows:
            response.columns.request_ids.extend(rows)
            response.columns.ids.extend(ids)
            response.columns.logprobs.extend([-1.2345678] * len(rows))
            response.columns.texts.extend([" token"] * len(rows))
            response.columns.is_special.extend([False] * len(rows))
        if batch.ends or batch.prompts:
            response.batch.CopyFrom(_kept(batch))
        for row in filter(self._owns, ended):
            response.generations.append(
                pb.Generation(
                    request_id=row,
                    tokens=pb.Tokens(ids=[7], logprobs=[-0.5], texts=[" end"], is_special=[False]),
                    generated_text=pb.GeneratedText(
                        text="the whole text", generated_tokens=batch.step, finish_reason=pb.FINISH_REASON_LENGTH
                    ),
                )
            )
        return bytes(response.SerializeToString())

    def _owns(self, row: int) -> bool:
        return row % self._num_ranks == self._rank


def _compute_chunks(batch: Batch, chunk_tokens: int) -> None:
    """A prompt that ends in this step brings its row a token; the rest share what the next step may compute, the oldest
    first."""
    prompts, batch.prompts = batch.prompts, {}
    for row, prompt in prompts.items():
        prompt.left -= prompt.chunk
        if prompt.left > 0:
            prompt.chunk = max(min(prompt.left, chunk_tokens), 1)
            chunk_tokens -= prompt.chunk
            batch.prompts[row] = prompt
        else:
            batch.ends[row] = batch.step + prompt.max_new_tokens - 1


def _kept(batch: Batch) -> pb.CachedBatch:
    ids = [*batch.ends, *batch.prompts]
    current_tokens = len(batch.ends) + sum(prompt.chunk for prompt in batch.prompts.values())
    return pb.CachedBatch(id=batch.batch_id, request_ids=ids, max_tokens=len(ids) * 256, current_tokens=current_tokens)


@dataclass
class Job:
    """One numbered call. `is_step`: it occupies the device. parts: each rank's work and answer, as they come."""

    is_step: bool
    parts: list[tuple[Callable[[], bytes], asyncio.Future[bytes]]] = field(default_factory=list)
    arrived_at: float = 0.0  # at the last rank

    def add(self, work: Callable[[], bytes], answer: asyncio.Future[bytes]) -> None:
        self.parts.append((work, answer))
        self.arrived_at = time.monotonic()


class Device:
    """Executes jobs in the order in which it gets them; on the loop while steps cost nothing, else on a thread."""

    def __init__(self, num_stages: int = 1) -> None:
        self.step_s = 0.0  # of each stage
        self.hop_s = self.back_s = 0.0  # from one stage to the next; from the last one to the first
        self.gate = threading.Event()
        self.gate.set()
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._num_on_thread = 0
        self._loop = asyncio.get_running_loop()
        self._free_at = [0.0] * num_stages
        self._trace: list[float] = []
        self.reset()
        threading.Thread(target=self._work, daemon=True).start()

    def reset(self) -> None:
        self._num_steps = 0
        self._idle_s = 0.0
        self._trace.clear()

    def statistics(self) -> dict[str, Any]:
        """Since the last reset: steps, seconds in which no step ran although a row was there, answer times."""
        return {"num_steps": self._num_steps, "idle_s": self._idle_s, "answered_at": list(self._trace)}

    def submit(self, job: Job) -> None:
        if self.step_s or self._num_on_thread or not self.gate.is_set():
            self._num_on_thread += 1
            self._jobs.put(job)
            return
        self._count(job)
        _resolve(job)

    def _work(self) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1)
        while True:
            job = self._jobs.get()
            self.gate.wait()
            if job.is_step and self.step_s:
                time.sleep(max(self._end_of(job) - time.monotonic(), 0.0))
            self._loop.call_soon_threadsafe(self._finish, job)

    def _end_of(self, job: Job) -> float:
        """When the step has been through all stages."""
        come_at = job.arrived_at
        for stage, free_at in enumerate(self._free_at):
            started_at = max(free_at, come_at)
            if stage == 0 and self._num_steps:
                self._idle_s += started_at - free_at
            self._free_at[stage] = started_at + self.step_s
            come_at = self._free_at[stage] + self.hop_s
        return come_at - self.hop_s + self.back_s

    def _finish(self, job: Job) -> None:
        self._num_on_thread -= 1
        self._count(job)
        _resolve(job)

    def _count(self, job: Job) -> None:
        if job.is_step:
            self._num_steps += 1
            if len(self._trace) < _MAX_TRACED:
                self._trace.append(time.monotonic())


def _resolve(job: Job) -> None:
    for work, answer in job.parts:
        result = work()
        if not answer.done():
            answer.set_result(result)


class NullShard:
    """The service of every rank: puts numbered calls into their order."""

    def __init__(
        self, path: str, num_blocks: int, *, chunks: bool, num_ranks: int, num_endpoints: int, num_stages: int
    ) -> None:
        """num_endpoints: 0: the router calls every rank itself."""
        self.device = Device(num_stages)
        self._num_stages = num_stages
        self._paths = [path, *(f"{path}-{rank}" for rank in range(1, num_ranks))]
        self._plans = _plans(self._paths, num_endpoints)
        self._chunks = chunks
        self._num_blocks = num_blocks
        self._waiting: dict[int, Job] = {}
        self._next = 0

    async def serve(self) -> None:
        self._servers = [await self._server(rank, path) for rank, path in enumerate(self._paths)]
        self._endpoints = [Endpoint(plan) for plan in self._plans]
        for endpoint in self._endpoints:
            await endpoint.start()

    async def _server(self, rank: int, path: str) -> grpc.aio.Server:
        server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)])
        handlers = self._handlers(Rows(rank, len(self._paths)))
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_insecure_port(f"unix:{path}")
        await server.start()
        return server

    def _handlers(self, rows: Rows) -> dict[str, Any]:
        urls = [plan.url for plan in self._plans] or [f"unix://{path}" for path in self._paths]
        return {
            "Info": _plain(pb.InfoRequest, self._info),
            "ServiceDiscovery": _plain(pb.ServiceDiscoveryRequest, lambda _: pb.ServiceDiscoveryResponse(urls=urls)),
            "Health": _plain(pb.HealthRequest, lambda _: pb.HealthResponse()),
            "Warmup": self._numbered(pb.WarmupRequest, self._warm_up, is_step=False),
            "Prefill": self._numbered(pb.PrefillRequest, rows.prefill, is_step=True),
            "Decode": self._numbered(pb.DecodeRequest, rows.decode, is_step=True),
            "FilterBatch": self._numbered(pb.FilterBatchRequest, rows.filter, is_step=False),
            "ClearCache": self._numbered(pb.ClearCacheRequest, rows.clear, is_step=False),
        }

    def _numbered(self, request_type: Any, run: Callable[[Any], bytes], *, is_step: bool) -> Any:
        async def handle(request: Any, context: Any) -> bytes:
            answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
            if request_type is pb.ClearCacheRequest and not request.HasField("id"):
                self._next = request.sequence
            self._waiting.setdefault(request.sequence, Job(is_step)).add(lambda: run(request), answer)
            while (job := self._waiting.get(self._next)) is not None and len(job.parts) == len(self._paths):
                del self._waiting[self._next]
                self._next += 1
                self.device.submit(job)
            return await answer

        return grpc.unary_unary_rpc_method_handler(handle, request_deserializer=request_type.FromString)

    def _info(self, request: pb.InfoRequest) -> pb.InfoResponse:
        return pb.InfoResponse(
            protocol=PROTOCOL, dtype="torch.float32", device_type="cuda", attention_impl="paged", block_size=BLOCK_SIZE,
            pipeline_depth=2, support_chunking=self._chunks,
            micro_batches=1 if self._num_stages == 1 else self._num_stages + 1,
            prefix_caching=True, grows=True, loads_adapters=True,
        )  # fmt: skip

    def _warm_up(self, request: pb.WarmupRequest) -> bytes:
        response = pb.WarmupResponse(
            max_supported_total_tokens=self._num_blocks * BLOCK_SIZE,
            max_input_tokens=request.max_input_tokens,
            max_total_tokens=request.max_total_tokens,
        )
        return bytes(response.SerializeToString())


def _plans(paths: list[str], number: int) -> list[EndpointPlan]:
    """Each for as many ranks, on a loopback port."""
    ranks = [Path(path) for path in paths]
    return [
        EndpointPlan(url=f"tcp://127.0.0.1:{free_port()}", sockets=tuple(ranks[first : first + len(ranks) // number]))
        for first in range(0, len(ranks) if number else 0, len(ranks) // (number or 1))
    ]


def _plain(request_type: Any, run: Callable[[Any], Any]) -> Any:
    async def handle(request: Any, context: Any) -> bytes:
        return bytes(run(request).SerializeToString())

    return grpc.unary_unary_rpc_method_handler(handle, request_deserializer=request_type.FromString)


async def setup() -> Mapping[str, Handler]:
    path, num_blocks, *options = sys.argv[1:]
    numbers = {name: int(number) for name, found, number in (text.partition("=") for text in options) if found}
    shard = NullShard(
        path,
        int(num_blocks),
        chunks="chunks" in options,
        num_ranks=numbers.get("ranks", 1),
        num_endpoints=numbers.get("endpoints", 0),
        num_stages=numbers.get("stages", 1),
    )
    await shard.serve()
    device = shard.device

    def pace(step_s: float) -> None:
        device.step_s = step_s

    def hops(hop_s: float, back_s: float) -> None:
        device.hop_s, device.back_s = hop_s, back_s

    return {
        "pace": pace,
        "hops": hops,
        "hold": device.gate.clear,
        "release": device.gate.set,
        "reset": device.reset,
        "statistics": device.statistics,
    }


if __name__ == "__main__":
    run_child(setup)
