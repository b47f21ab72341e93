"""A scripted shard that speaks the true protocol.

`FakeShard` holds the rules: batches kept between calls, one token per step and row, calls executed strictly in the
order of their numbers. `fake_shard_server` shows two ways to reach it.

With `chunking` the arithmetic of chunks, more blocks and resumption are followed too. Every slot remembers its token.
Breaches of the protocol are collected in `violations`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc
from support.block_watch import BlockWatch, KvMemory
from support.fake_rows import FakeRow, Script, cached_batch, name_of, next_chunks, shared_blocks

from router.shards.interface import PROBE_ID
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb

ORDERED_CALLS = ("Prefill", "Decode", "FilterBatch", "ClearCache", "Warmup")


class ShardFailure(Exception):
    """What a failing call answers with."""

    def __init__(self, message: str, *, code: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> None:
        super().__init__(message)
        self.code = code


@dataclass
class ReceivedCall:
    """A call in the order of arrival; `number` is its place in the order of execution."""

    rpc: str
    request: Any
    number: int
    answer: asyncio.Future[Any]


def merge(answer: Any, later: Any) -> None:
    """Put the row of `later`, if it has one, behind the tokens of the row of `answer`."""
    if answer.columns.request_ids:
        columns = answer.columns
        tokens = pb.Tokens(
            ids=columns.ids, logprobs=columns.logprobs, texts=columns.texts, is_special=columns.is_special
        )
        answer.generations.append(pb.Generation(request_id=columns.request_ids[0], tokens=tokens))
        answer.ClearField("columns")
    if later.columns.request_ids:
        merge(later, type(later)())
    if not (answer.generations and later.generations):
        return
    first, second = answer.generations[0], later.generations[0]
    first.tokens.MergeFrom(second.tokens)
    first.top_tokens.extend(second.top_tokens)
    if second.HasField("generated_text"):
        first.generated_text.CopyFrom(second.generated_text)
    if second.error:
        answer.generations.append(pb.Generation(request_id=second.request_id, error=second.error))


@dataclass
class FakeShard:
    """One rank. `permits` is None (runs freely) or the number of further calls that may be executed; see `step`."""

    rank: int = 0
    world_size: int = 1
    block_size: int = 1
    state_slots: int = 0
    state_grid: int = 0
    speculate: int = 0
    drafts: int = 0  # tokens that a step may give a row beyond one, by a rule of its own
    pipeline_depth: int = 2
    micro_batches: int = 1
    adapter_slots: int | None = None
    device_type: str = "cpu"
    chunking: bool = False
    prefix_caching: bool = False
    max_prefill_tokens: int | None = None  # what the warm-up said, unless set
    capacity: int = 16000
    max_positions: int = 2**31
    urls: tuple[str, ...] = ()
    scripts: dict[str, Script] = field(default_factory=dict)
    permits: int | None = None
    # Called with (rpc, request) before a call is executed; what it returns is raised instead.
    failure: Callable[[str, Any], ShardFailure | None] = lambda rpc, request: None
    # Set to change answers, e.g. to make ranks disagree.
    edit: Callable[[str, Any], Any] = lambda rpc, response: response
    # Of requests whose prompts have none.
    names: dict[int, str] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)
    received: list[tuple[str, Any]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    batches: dict[int, list[FakeRow]] = field(default_factory=dict)
    max_in_flight: int = 0

    def __post_init__(self) -> None:
        self._pending: dict[int, ReceivedCall] = {}
        self._expected = 0
        self._lost: set[int] = set()
        self._used: set[int] = set()
        self._blocks = BlockWatch(self.violations)
        self._memory = KvMemory(self.violations)

    # How calls come in.

    async def handle(self, rpc: str, request: Any) -> Any:
        return await asyncio.shield(self.accept(rpc, request))

    def accept(self, rpc: str, request: Any) -> asyncio.Future[Any]:
        """Take a call in; it is executed when its turn comes and a permit is left."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.received.append((rpc, request))
        if rpc not in ORDERED_CALLS:
            self._answer(rpc, request, answer)
            return answer
        if rpc == "ClearCache" and not request.HasField("id"):
            self._expected = request.sequence
            self._pending.clear()
        number = request.sequence
        if number in self._pending or number < self._expected:
            self.violations.append(f"{rpc}: number {number} is used twice")
        self._pending[number] = ReceivedCall(rpc, request, number, answer)
        self.max_in_flight = max(self.max_in_flight, len(self._pending))
        if rpc in ("Prefill", "Decode"):
            given = [b for g in request.new_blocks for b in g.blocks]
            if rpc == "Prefill":
                given += [
                    b for r in request.batch.requests for b in r.blocks if b not in shared_blocks(r, self.block_size)
                ]
            running = [n for n, call in self._pending.items() if call.rpc in ("Prefill", "Decode")]
            self._blocks.check_reuse(given, running)
        self._pump()
        return answer

    def step(self, count: int = 1) -> None:
        """Let `count` more calls be executed."""
        self.permits = (self.permits or 0) + count
        self._pump()

    def run_freely(self) -> None:
        self.permits = None
        self._pump()

    @property
    def num_waiting(self) -> int:
        """Calls that have arrived and are not executed."""
        return len(self._pending)

    def _pump(self) -> None:
        while self._expected in self._pending and self.permits != 0:
            if self.permits is not None:
                self.permits -= 1
            call = self._pending.pop(self._expected)
            self._expected += 1
            self._answer(call.rpc, call.request, call.answer)

    def _answer(self, rpc: str, request: Any, answer: asyncio.Future[Any]) -> None:
        try:
            response = self.edit(rpc, self._execute(rpc, request))
        except ShardFailure as failure:
            if not answer.done():
                answer.set_exception(failure)
        else:
            if not answer.done():
                answer.set_result(response)

    def _execute(self, rpc: str, request: Any) -> Any:
        failure = self.failure(rpc, request)
        if failure is not None:
            self._lose(rpc, request)
            raise failure
        execute: dict[str, Callable[[Any], Any]] = {
            "Info": self._info, "ServiceDiscovery": self._discover, "Health": self._health, "Warmup": self._warm_up,
            "ClearCache": self._clear, "FilterBatch": self._filter, "Prefill": self._prefill, "Decode": self._decode,
        }  # fmt: skip
        return execute[rpc](request)

    def _lose(self, rpc: str, request: Any) -> None:
        """What a failing call does to its batches."""
        ids = {
            "Prefill": lambda: [request.cached_id] * request.HasField("cached_id") + [request.batch.id],
            "Decode": lambda: list(request.batch_ids),
            "FilterBatch": lambda: [request.batch_id],
            "ClearCache": lambda: [request.id],
        }.get(rpc, list)()
        self.trace.append(f"{rpc[0]}!({','.join(str(i) for i in ids)})")
        if rpc != "ClearCache":
            self._lost.update(ids)
        for batch_id in ids:
            for row in self.batches.pop(batch_id, []):
                self._release(row)
        if rpc == "Prefill":
            self._used.add(request.batch.id)

    # The protocol's calls.

    def _info(self, request: pb.InfoRequest) -> pb.InfoResponse:
        return pb.InfoResponse(
            protocol=PROTOCOL,
            dtype="torch.float32",
            device_type=self.device_type,
            speculate=self.speculate or self.drafts,
            support_chunking=self.chunking,
            prefix_caching=self.prefix_caching,
            attention_impl="paged",
            block_size=self.block_size,
            state_slots=self.state_slots,
            state_grid=self.state_grid,
            pipeline_depth=self.pipeline_depth,
            micro_batches=self.micro_batches,
            adapter_slots=self.adapter_slots,
            grows=self.chunking,
            loads_adapters=True,
            images=True,
        )

    def _discover(self, request: pb.ServiceDiscoveryRequest) -> pb.ServiceDiscoveryResponse:
        return pb.ServiceDiscoveryResponse(urls=self.urls)

    def _health(self, request: pb.HealthRequest) -> pb.HealthResponse:
        self.trace.append("H")
        return pb.HealthResponse()

    def _warm_up(self, request: pb.WarmupRequest) -> pb.WarmupResponse:
        self.trace.append("W")
        if self.max_prefill_tokens is None:
            self.max_prefill_tokens = request.max_prefill_tokens
        default_total = sum(len(r.input_ids) for r in request.batch.requests)
        if self.chunking:
            default_total = min(self.capacity, self.max_positions)
        max_total = request.max_total_tokens if request.HasField("max_total_tokens") else default_total
        max_input = request.max_input_tokens if request.HasField("max_input_tokens") else max_total - 1
        return pb.WarmupResponse(
            max_input_tokens=max_input, max_total_tokens=max_total, max_supported_total_tokens=self.capacity
        )

    def _clear(self, request: pb.ClearCacheRequest) -> pb.ClearCacheResponse:
        ids = [request.id] if request.HasField("id") else list(self.batches)
        if request.HasField("id"):
            self.trace.append(f"C({request.id})" if request.id != PROBE_ID else "C(probe)")
        for batch_id in ids:
            self._lost.discard(batch_id)
            for row in self.batches.pop(batch_id, []):
                self._release(row, filtered=True)
        return pb.ClearCacheResponse()

    def _filter(self, request: pb.FilterBatchRequest) -> pb.FilterBatchResponse:
        rows = self._find(request.batch_id)
        wanted = set(request.request_ids)
        self.trace.append(f"F({','.join(self.names[i] for i in request.request_ids)})")
        for row in rows:
            if row.request.id not in wanted:
                self._release(row, filtered=True)
        kept = [row for row in rows if row.request.id in wanted]
        if kept:
            self.batches[request.batch_id] = kept
        else:
            self.batches.pop(request.batch_id, None)
        return pb.FilterBatchResponse(batch=self._cached(request.batch_id))

    def _prefill(self, request: pb.PrefillRequest) -> pb.PrefillResponse:
        batch = request.batch
        joins = request.HasField("cached_id")
        if joins and not self.chunking:
            self.violations.append("Prefill with a cached batch")
        running = self._find(request.cached_id) if joins else []
        rows = [self._new_row(r) for r in batch.requests]
        names = ",".join(r.name + (f":{r.input_length}" if r.request.HasField("chunk_len") else "") for r in rows)
        with_running = "+" + ",".join(r.name for r in running) if joins else ""
        self.trace.append("probe" if batch.id == PROBE_ID else f"P({names}{with_running})")
        if batch.id in self._used and batch.id != PROBE_ID:
            self.violations.append(f"batch id {batch.id} is used twice")
        self._used.add(batch.id)
        batch_id = request.cached_id if joins else batch.id
        self.batches[batch_id] = running + rows
        self._check_adapters()
        self._grow(request.new_blocks)
        response = pb.PrefillResponse(forward_ns=2_000_000, decode_ns=1_000_000, total_ns=3_000_000)
        self._run(batch_id, response, request)
        return response

    def _decode(self, request: pb.DecodeRequest) -> pb.DecodeResponse:
        ids = list(request.batch_ids)
        rows = [row for batch_id in ids for row in self._find(batch_id)]
        names = ",".join(r.name + (f":{r.input_length}" if r.prefilling else "") for r in rows)
        self.trace.append(f"D({names})")
        response = pb.DecodeResponse(forward_ns=2_000_000, decode_ns=1_000_000, total_ns=3_000_000)
        if len(ids) > 1:
            response.concat_ns = 500_000
        for batch_id in ids:
            self.batches.pop(batch_id, None)
        if any(row.ended for row in rows):
            self.violations.append("Decode of a batch with requests that ended")
        if rows:
            self.batches[ids[0]] = rows
            self._grow(request.new_blocks)
            self._run(ids[0], response, request)
        return response

    def _grow(self, growth: Iterable[pb.BlockGrowth]) -> None:
        rows = {row.request.id: row for rows in self.batches.values() for row in rows}
        for more in growth:
            row = rows.get(more.request_id)
            if row is not None:
                self._blocks.take(row.name, more.request_id, more.blocks)
                row.grow(more.blocks)

    def _check_adapters(self) -> None:
        requests = [row.request for rows in self.batches.values() for row in rows]
        adapters = {request.adapter_id for request in requests if request.adapter_id}
        if self.adapter_slots is not None and len(adapters) > self.adapter_slots:
            self.violations.append(f"{len(adapters)} adapters in {self.adapter_slots} slots")

    def _release(self, row: FakeRow, *, filtered: bool = False) -> None:
        """A row that ended may still be part of the calls in flight; one that was filtered away is not."""
        self._blocks.release(row.request.id, row.blocks, () if filtered else self._may_write())

    def _may_write(self) -> list[int]:
        """Calls that may still write for a row that is in its batch now: those before the next change of members."""
        calls: list[int] = []
        for number in sorted(self._pending):
            if self._pending[number].rpc in ("FilterBatch", "ClearCache"):
                break
            calls.append(number)
        return calls

    # The model.

    def _find(self, batch_id: int) -> list[FakeRow]:
        rows = self.batches.get(batch_id)
        if rows is not None:
            return rows
        if batch_id in self._lost or batch_id not in self._used:
            raise ShardFailure(f"batch {batch_id} is gone")
        return []  # ended normally

    def _new_row(self, request: pb.Request) -> FakeRow:
        name = self.names.setdefault(request.id, name_of(request))
        row = FakeRow(request, name, self.scripts.get(name, Script()), self.block_size)
        if request.id == PROBE_ID:
            return row
        self.violations += row.breaches(may_grow=self.chunking)
        self._blocks.take(name, request.id, row.blocks, shared_blocks(request, self.block_size))
        return row

    def _run(self, batch_id: int, response: Any, request: pb.PrefillRequest | pb.DecodeRequest) -> None:
        """One step: every row gets a token, ends, or fails; or its prompt gets on by a chunk."""
        rows = self.batches[batch_id]
        is_decode = not any(row.prefilling for row in rows)
        for row, next_length in zip(rows, self._next_chunks(rows, request), strict=True):
            self._compute(row)
            row.prefilling = next_length is not None
            row.input_length = next_length or 1
            if not row.prefilling and is_decode and self.drafts:
                self._advance_several(row, response)
            elif not row.prefilling:
                self._advance(row, response)
        rows = [row for row in rows if not row.ended]
        if not rows:
            del self.batches[batch_id]
            return
        self.batches[batch_id] = rows
        response.batch.CopyFrom(self._cached(batch_id))

    def _next_chunks(self, rows: list[FakeRow], request: pb.PrefillRequest | pb.DecodeRequest) -> list[int | None]:
        """The oldest prompt first."""
        most = self.max_prefill_tokens or 2**31
        return next_chunks(rows, most, request.chunk_tokens if request.HasField("chunk_tokens") else most)

    def _compute(self, row: FakeRow) -> None:
        end = row.cache_length + row.input_length
        if row.request.id != PROBE_ID:
            if end > len(row.slots):
                self.violations.append(f"{row.name}: no slot for position {end - 1}")
            else:
                self._memory.step(row.name, row.ids, row.slots, row.cache_length, end)
        row.cache_length = end

    def _advance_several(self, row: FakeRow, response: Any) -> None:
        """As far as the row has slots: its tokens as one row of the answer."""
        whole = type(response)()
        self._advance(row, whole)
        for _ in range((row.request.id + row.num_generated) % (self.drafts + 1)):
            if row.ended or row.cache_length >= len(row.slots):
                break
            self._compute(row)
            later = type(response)()
            self._advance(row, later)
            merge(whole, later)
        response.MergeFrom(whole)

    def _advance(self, row: FakeRow, response: Any) -> None:
        row.num_generated += 1
        n = row.num_generated
        stop = row.request.stopping_parameters
        owned = row.request.id % self.world_size == self.rank
        failed = row.script.error_at == n
        finished = n >= stop.max_new_tokens or row.script.eos_after == n
        if failed or finished:
            row.ended = True
            self._blocks.forbid(row.blocks, self._may_write())
            self._release(row)
        if not owned:
            return
        if failed:
            response.generations.add(
                request_id=row.request.id,
                error=f"{row.name} went wrong",
                grammar_at_fault=row.script.grammar_at_fault,
                overloaded=row.script.overloaded,
            )
        elif finished or row.request.top_n_tokens or row.request.prefill_logprobs:
            response.generations.append(row.generation(finished))
        else:
            row.add_to(response.columns)

    def _cached(self, batch_id: int) -> pb.CachedBatch | None:
        rows = self.batches.get(batch_id)
        return cached_batch(batch_id, rows) if rows else None
