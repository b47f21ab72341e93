"""All shards as one: every call to every rank, with equal answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from router.limits import ShardInfo
from router.lora.registry import AdapterLost, AdapterRefused, AdapterSize
from router.shards import convert, pooling, warm_up
from router.shards.client import Client, Rpc, ShardClient
from router.shards.interface import CachedBatch, DecodeCall, PrefillCall, ShardError, StepReply
from router.shards.pooling import PooledCapacity, StepAnswer, TextItem
from router.shards.warm_up import Capacity, WarmUpPlan
from wire.lora.v1 import lora_pb2 as lora_pb
from wire.rpc.fan_out import gathered
from wire.v3 import generate_pb2 as pb

T = TypeVar("T")

# For calls outside the order. The numbered ones wait their turn after steps of any length, so they have no deadline of
# their own: the scheduler watches for the oldest of them.
HEALTH_TIMEOUT_S = 10.0
_START_TIMEOUT_S = 60.0


class ShardPool:
    """One model's ranks as `Shards`; calls are numbered in order."""

    def __init__(self, clients: Sequence[Client], *, health_timeout_s: float = HEALTH_TIMEOUT_S) -> None:
        self._clients = list(clients)
        self._health_timeout_s = health_timeout_s
        self._next_sequence = 0

    @classmethod
    async def discover(
        cls,
        master_uds_path: str,
        connect: Callable[[str], Client] = ShardClient,
        *,
        health_timeout_s: float = HEALTH_TIMEOUT_S,
    ) -> ShardPool:
        """Ask rank 0 for addresses, and `connect`."""
        master = connect(master_uds_path)
        try:
            answer = await master.send("ServiceDiscovery", pb.ServiceDiscoveryRequest(), _START_TIMEOUT_S)
        finally:
            await master.close()
        if not answer.urls:
            raise ShardError("the shard's ServiceDiscovery lists no addresses")
        return cls([connect(url) for url in answer.urls], health_timeout_s=health_timeout_s)

    async def close(self) -> None:
        """Close the channels."""
        await asyncio.gather(*(client.close() for client in self._clients))

    # At start.

    async def clear_all(self) -> None:
        """Forget an earlier router's batches."""
        self._next_sequence = 0
        await self._to_all("ClearCache", pb.ClearCacheRequest(sequence=self._number()), _START_TIMEOUT_S)

    async def info(self) -> ShardInfo:
        return convert.info_from(_of_all_ranks(await self._to_all("Info", pb.InfoRequest(), _START_TIMEOUT_S)))

    async def warm_up(self, plan: WarmUpPlan) -> Capacity:
        """Run the largest prefill on all ranks; the smallest answer counts."""
        request = warm_up.request_to(plan)
        request.sequence = self._number()
        return warm_up.capacity_from(_of_all_ranks(await self._to_all("Warmup", request)))

    async def health(self) -> None:
        await self._to_all("Health", pb.HealthRequest(), self._health_timeout_s)

    # Numbered calls, sent at once.

    def prefill(self, call: PrefillCall) -> asyncio.Future[StepReply]:
        return _soon(_step("Prefill", self._send("Prefill", convert.prefill_to(call)), call))

    def probe(self) -> asyncio.Future[StepReply]:
        return self._step("Prefill", convert.probe_to())

    def decode(self, call: DecodeCall) -> asyncio.Future[StepReply]:
        return self._step("Decode", convert.decode_to(call))

    def filter_batch(self, batch_id: int, request_ids: Sequence[int]) -> asyncio.Future[CachedBatch | None]:
        request = pb.FilterBatchRequest(batch_id=batch_id, request_ids=request_ids)
        return _soon(_filtered(self._send("FilterBatch", request)))

    def clear_cache(self, batch_id: int) -> asyncio.Future[None]:
        return _soon(_cleared(self._send("ClearCache", pb.ClearCacheRequest(id=batch_id))))

    # Shards that give vectors and scores.

    async def warm_up_pooling(self, max_batch_tokens: int, max_input_tokens: int | None) -> PooledCapacity:
        request = pooling.warm_up_to(max_batch_tokens, max_input_tokens)
        request.sequence = self._number()
        return pooling.capacity_from(_of_all_ranks(await self._to_all("WarmUpPooling", request)))

    def run_texts(self, items: Sequence[TextItem]) -> asyncio.Future[StepAnswer]:
        """One step over some texts."""
        return _soon(_texts(self._send("RunTexts", pooling.run_to(items))))

    # Adapters that come while the shards serve.

    async def check_adapter(self, name: str, path: str) -> AdapterSize:
        sizes = await self._sizes_of(lora_pb.LoadRequest(name=name, path=path))
        if len({size.num_bytes for size in sizes}) > 1 or _are_different(sizes):
            raise _differ(name, path)
        return sizes[0]

    async def load_adapter(self, load_id: int, name: str, path: str) -> AdapterSize:
        """Load on all ranks or none, beside the order."""
        try:
            sizes = await self._sizes_of(lora_pb.LoadRequest(id=load_id, name=name, path=path))
            if _are_different(sizes):  # only now are all numbers read
                raise _differ(name, path)
        except (AdapterRefused, AdapterLost):
            with contextlib.suppress(AdapterLost):
                await self.drop_adapter(load_id)
            raise
        return AdapterSize(max(size.num_bytes for size in sizes), max(size.rank for size in sizes))

    async def drop_adapter(self, load_id: int) -> None:
        """Drop between the same two steps on all ranks."""
        try:
            await _gather(self._send("DropAdapter", lora_pb.DropRequest(id=load_id)))
        except ShardError as error:
            raise AdapterLost(str(error)) from error

    async def _sizes_of(self, request: lora_pb.LoadRequest) -> list[AdapterSize]:
        """In rank order."""
        try:
            answers = _of_all_ranks(await self._to_all("LoadAdapter", request))
        except ShardError as error:
            raise AdapterLost(str(error)) from error
        refused = next((answer.refused for answer in answers if answer.HasField("refused")), None)
        if refused is not None:
            raise AdapterRefused(refused)
        return [AdapterSize(answer.num_bytes, answer.rank, answer.digest) for answer in answers]

    # Fan-out.

    def _step(self, rpc: Rpc, request: pb.PrefillRequest | pb.DecodeRequest) -> asyncio.Future[StepReply]:
        return _soon(_step(rpc, self._send(rpc, request)))

    def _send(self, rpc: Rpc, request: Any) -> list[Awaitable[Any]]:
        """Number a call, and send it to all."""
        request.sequence = self._number()
        return [client.send(rpc, request) for client in self._clients]

    async def _to_all(self, rpc: Rpc, request: Any, timeout_s: float | None = None) -> list[Any]:
        return await _gather([client.send(rpc, request, timeout_s) for client in self._clients])

    def _number(self) -> int:
        number = self._next_sequence
        self._next_sequence += 1
        return number


def _are_different(sizes: Sequence[AdapterSize]) -> bool:
    """Whether ranks read different adapters."""
    return len({size.rank for size in sizes}) > 1 or len({size.digest for size in sizes if size.digest}) > 1


def _differ(name: str, path: str) -> AdapterRefused:
    return AdapterRefused(f"LoRA adapter `{name}`: the nodes have different adapters in {path}")


def _soon(answer: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().create_task(answer)


async def _step(rpc: Rpc, answers: list[Awaitable[Any]], kept: PrefillCall | None = None) -> StepReply:
    """Await a step; `kept` stays for ranks that open its images' memory, all or none."""
    messages = _of_all_ranks(await _gather(answers))
    _demand_agreement(rpc, messages)
    return convert.step_from(messages)


async def _texts(answers: list[Awaitable[Any]]) -> StepAnswer:
    return pooling.step_from(_of_all_ranks(await _gather(answers)))


async def _gather(answers: list[Awaitable[Any]]) -> list[Any]:
    return await gathered(answers, ends_at=lambda error: not isinstance(error, ShardError) or error.fatal)


def _of_all_ranks(answers: list[Any]) -> list[Any]:
    """Return answers by rank, an endpoint's split."""
    return [one for answer in answers for one in (answer, *answer.other_ranks)]


async def _filtered(answers: list[Awaitable[Any]]) -> CachedBatch | None:
    messages = _of_all_ranks(await _gather(answers))
    _demand_agreement("FilterBatch", messages)
    last = messages[-1]
    return convert.cached_batch_from(last.batch) if last.HasField("batch") else None


async def _cleared(answers: list[Awaitable[Any]]) -> None:
    await _gather(answers)


def _demand_agreement(rpc: Rpc, messages: list[Any]) -> None:
    """Demand that ranks keep the same requests."""
    first = messages[0]
    for message in messages[1:]:
        same = message.HasField("batch") == first.HasField("batch") and (
            message.batch.id == first.batch.id and message.batch.request_ids == first.batch.request_ids
        )
        if not same:
            raise ShardError(f"the shards disagree about the batch after {rpc}")
