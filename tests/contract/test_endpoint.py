"""The endpoint of a node between the real router's pool and shards behind sockets."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from support.factories import make_request
from support.fake_shard import FakeShard, ShardFailure
from support.fake_shard_server import serve
from support.node_certificates import certificates
from support.slow_relay import slow_relay

from model_server.errors import StartupError
from model_server.rpc.endpoint import Endpoint, EndpointPlan
from router.lora.registry import AdapterRefused
from router.shards.client import Rpc, ShardClient
from router.shards.interface import DecodeCall, NewBatch, NewRequest, PrefillCall, ShardError
from router.shards.pool import ShardPool
from router.shards.warm_up import WarmUpPlan
from wire.lora.v1 import lora_pb2, lora_pb2_grpc
from wire.rpc import remote_grpc
from wire.rpc.mutual_tls import MutualTls

TOKEN = "secret of the group"
PLAN = WarmUpPlan(max_input_tokens=None, max_prefill_tokens=64, max_total_tokens=None, max_batch_size=None)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def batch_of(*names: str) -> NewBatch:
    blocks = [list(range(1 + 10 * i, 5 + 10 * i)) for i in range(len(names))]
    requests = [NewRequest(i, make_request(name, 1, 4), blocks[i]) for i, name in enumerate(names)]
    return NewBatch(0, requests)


@asynccontextmanager
async def nodes(
    shards: list[FakeShard],
    prefix: str,
    size: int = 2,
    token: str | None = None,
    tls: MutualTls | None = None,
    adapters: Sequence[lora_pb2_grpc.AdaptersServicer] = (),
) -> AsyncIterator[str]:
    """The ranks behind `size` endpoints, the first a unix one, the others on TCP; yields the socket of rank 0.
    adapters: the service of each rank."""
    sockets = [Path(f"{prefix}-{rank}") for rank in range(len(shards))]
    each = len(shards) // size
    plans = [
        EndpointPlan(
            url=f"tcp://127.0.0.1:{free_port()}" if node else f"unix://{prefix}-node",
            sockets=tuple(sockets[node * each : (node + 1) * each]),
            token=token,
            tls=tls if node else None,
        )
        for node in range(size)
    ]
    async with serve(*shards, prefix=prefix, adapters=adapters) as path:
        shards[0].urls = tuple(plan.url for plan in plans)
        endpoints = [Endpoint(plan) for plan in plans]
        for endpoint in endpoints:
            await endpoint.start()
        try:
            yield path
        finally:
            for endpoint in endpoints:
                await endpoint.stop(0)


async def connected(path: str, token: str | None = TOKEN, tls: MutualTls | None = None) -> ShardPool:
    return await ShardPool.discover(path, lambda url: ShardClient(url, token, tls=tls))


@pytest.fixture
def shards() -> list[FakeShard]:
    return [FakeShard(rank=rank, world_size=4) for rank in range(4)]


async def test_every_rank_gets_every_call_and_all_answers_come_back(tmp_path, shards):
    async with nodes(shards, str(tmp_path / "shard"), token=TOKEN) as path:
        pool = await connected(path)
        await pool.clear_all()
        await pool.info()
        await pool.warm_up(PLAN)
        await pool.health()
        calls = [pool.prefill(PrefillCall(batch_of("a", "b", "c", "d"))), *(pool.decode(DecodeCall([0])) for _ in "12")]
        prefilled, decoded, _ = [await call for call in calls]
        assert [i for columns in prefilled.columns for i in columns.request_ids] == [0, 1, 2, 3]
        assert len(decoded.columns) == 4
        assert list((await pool.filter_batch(0, [1, 2])).request_ids) == [1, 2]
        await pool.clear_cache(0)
        await pool.close()
    for shard in shards:
        assert shard.trace[1:] == ["H", "P(a,b,c,d)", "D(a,b,c,d)", "D(a,b,c,d)", "F(b,c)", "C(0)"]
        assert shard.violations == []


class NotingClient(ShardClient):
    """Notes each call that the router sends."""

    def __init__(self, url: str, sent: Counter[tuple[str, str]]) -> None:
        super().__init__(url)
        self._url, self._sent = url, sent

    def send(self, rpc: Rpc, *arguments: Any) -> Awaitable[Any]:
        self._sent[self._url, rpc] += 1
        return super().send(rpc, *arguments)


@pytest.mark.parametrize("num_ranks", [8, 64])
async def test_the_router_calls_each_endpoint_once_however_many_ranks_are_behind(tmp_path, num_ranks):
    shards = [FakeShard(rank=rank, world_size=num_ranks) for rank in range(num_ranks)]
    sent: Counter[tuple[str, str]] = Counter()
    async with nodes(shards, str(tmp_path / "shard"), 8) as path:
        pool = await ShardPool.discover(path, lambda url: NotingClient(url, sent))
        await pool.clear_all()
        await pool.info()
        await pool.warm_up(PLAN)
        sent.clear()
        prefilled = await pool.prefill(PrefillCall(batch_of("a", "b")))
        await pool.decode(DecodeCall([0]))
        await pool.close()
    assert sorted(sent) == sorted((url, rpc) for url in shards[0].urls for rpc in ("Prefill", "Decode"))
    assert set(sent.values()) == {1}
    assert [i for columns in prefilled.columns for i in columns.request_ids] == [0, 1]
    assert all(shard.trace[-2:] == ["P(a,b)", "D(a,b)"] and not shard.violations for shard in shards)


async def test_a_slow_connection_changes_no_answer_and_shows_in_the_time_of_a_call(tmp_path, shards):
    """The shards' own times stay those of the forward, so what is left of a call is the network's."""
    delay_s = 0.05
    async with nodes(shards, str(tmp_path / "shard"), token=TOKEN) as path:
        *_, far = shards[0].urls
        async with slow_relay(int(far.rpartition(":")[2]), delay_s) as port:
            shards[0].urls = (shards[0].urls[0], f"tcp://127.0.0.1:{port}")
            pool = await connected(path)
            await pool.clear_all()
            await pool.info()
            await pool.warm_up(PLAN)
            started = time.monotonic()
            calls = [pool.prefill(PrefillCall(batch_of("a", "b"))), *(pool.decode(DecodeCall([0])) for _ in "12")]
            answers = [await call for call in calls]
            assert time.monotonic() - started >= 2 * delay_s
            await pool.close()
    assert [[i for columns in one.columns for i in columns.request_ids] for one in answers[:2]] == [[0, 1], [0, 1]]
    assert all(answer.timings.forward_s < delay_s for answer in answers)
    for shard in shards:
        assert shard.trace[-3:] == ["P(a,b)", "D(a,b)", "D(a,b)"] and shard.violations == []


async def test_the_failure_of_any_rank_of_a_node_reaches_the_router(tmp_path, shards):
    async with nodes(shards, str(tmp_path / "shard"), token=TOKEN) as path:
        pool = await connected(path)
        shards[3].failure = lambda rpc, request: ShardFailure("no such batch")
        with pytest.raises(ShardError, match="no such batch") as caught:
            await pool.clear_all()
        assert not caught.value.fatal
        shards[3].failure = lambda rpc, request: ShardFailure("/tmp/socket", code=grpc.StatusCode.UNAVAILABLE)
        with pytest.raises(ShardError, match=r"^the model server cannot be reached$") as caught:
            await pool.health()
        assert caught.value.fatal
        await pool.close()


@pytest.mark.parametrize("token", [None, "another"])
async def test_a_call_without_the_token_is_refused_before_its_message_is_read(tmp_path, shards, token):
    async with nodes(shards, str(tmp_path / "shard"), token=TOKEN) as path:
        pool = await connected(path, token)
        with pytest.raises(ShardError, match=r"the model server failed .UNAUTHENTICATED.") as caught:
            await pool.health()
        assert "token of the group" in caught.value.detail
        await pool.close()
        target = remote_grpc.grpc_target(shards[0].urls[1])
        async with grpc.aio.insecure_channel(target) as channel:
            # A call whose message never comes gets its answer all the same.
            call = channel.stream_unary("/generate.v3.TextGenerationService/Health")()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await asyncio.wait_for(call, 30)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert [rpc for shard in shards for rpc, _ in shard.received] == ["ServiceDiscovery"]


async def test_a_group_without_a_token_asks_for_none(tmp_path, shards):
    async with nodes(shards, str(tmp_path / "shard")) as path:
        pool = await connected(path, None)
        await pool.health()
        await pool.close()


async def test_with_certificates_only_their_holders_are_answered(tmp_path, shards):
    tls = certificates(tmp_path / "group")
    async with nodes(shards, str(tmp_path / "shard"), token=TOKEN, tls=tls) as path:
        pool = await connected(path, tls=tls)
        await pool.health()
        await pool.close()
        for stranger in (None, certificates(tmp_path / "other")):
            pool = await connected(path, tls=stranger)
            with pytest.raises(ShardError, match="the model server cannot be reached"):
                await pool.health()
            await pool.close()


async def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(StartupError, match=f"cannot listen on {url} for the router; choose another --shard-port"):
            await Endpoint(EndpointPlan(url=url, sockets=(tmp_path / "socket",))).start()


class Adapters(lora_pb2_grpc.AdaptersServicer):  # type: ignore[misc]  # generated code has no types
    """What one rank loads: `size` bytes of an adapter that has `whole`. refused: why it loads none."""

    def __init__(self, size: int) -> None:
        self.size, self.whole, self.rank, self.refused = size, 100, 4, ""
        self.digest = b""
        self.loaded: dict[int, str] = {}
        self.sequences: list[int] = []

    async def Load(self, request: Any, context: Any) -> Any:
        if self.refused:
            return lora_pb2.LoadResponse(refused=self.refused)
        if request.id:
            self.loaded[request.id] = request.name
        size = self.size if request.id else self.whole
        return lora_pb2.LoadResponse(num_bytes=size, rank=self.rank, digest=self.digest)

    async def Drop(self, request: Any, context: Any) -> Any:
        self.loaded.pop(request.id, None)
        self.sequences.append(request.sequence)
        return lora_pb2.DropResponse()


async def test_adapters_are_loaded_on_all_ranks_of_all_nodes_or_on_none(tmp_path, shards):
    ranks = [Adapters(size) for size in (1, 2, 3, 9)]
    async with nodes(shards, str(tmp_path / "shard"), token=TOKEN, adapters=ranks) as path:
        pool = await connected(path)
        assert (await pool.check_adapter("a", "folder")).num_bytes == 100
        size = await pool.load_adapter(1, "a", "folder")
        assert (size.num_bytes, size.rank) == (9, 4) and all(rank.loaded == {1: "a"} for rank in ranks)
        ranks[3].refused = "it is damaged"
        with pytest.raises(AdapterRefused, match="it is damaged"):
            await pool.load_adapter(2, "b", "folder")
        assert all(rank.loaded == {1: "a"} for rank in ranks)
        ranks[3].refused, ranks[3].rank = "", 8  # its folder has changed since the check
        with pytest.raises(AdapterRefused, match="LoRA adapter `b`: the nodes have different adapters in folder"):
            await pool.load_adapter(3, "b", "folder")
        assert all(rank.loaded == {1: "a"} for rank in ranks)
        ranks[3].rank, ranks[0].digest, ranks[2].digest = 4, b"one", b"one"  # of the first rank of each node
        assert (await pool.check_adapter("b", "folder")).num_bytes == 100
        await pool.load_adapter(4, "b", "folder")
        ranks[2].digest = b"another"
        for call in (lambda: pool.check_adapter("b", "folder"), lambda: pool.load_adapter(5, "b", "folder")):
            with pytest.raises(AdapterRefused, match="LoRA adapter `b`: the nodes have different adapters in folder"):
                await call()
        assert all(rank.loaded == {1: "a", 4: "b"} for rank in ranks)
        await pool.drop_adapter(1)
        await pool.drop_adapter(4)
        assert all(rank.loaded == {} and rank.sequences == [0, 1, 2, 3, 4] for rank in ranks)
        ranks[2].digest, ranks[2].whole = b"one", 99
        with pytest.raises(AdapterRefused, match="LoRA adapter `b`: the nodes have different adapters in folder"):
            await pool.check_adapter("b", "folder")
        await pool.close()
