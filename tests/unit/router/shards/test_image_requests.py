"""Images on the wire: each once in a call, with arrays only where tokens are still to be computed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from support.factories import make_request

from router.request import PlacedImage
from router.shards import convert
from router.shards.interface import NewBatch, NewRequest, PrefillCall
from router.shards.pool import ShardPool
from wire.images.prepared import Feature, ImagePlace, PreparedImage
from wire.processes.shared_memory import SharedBytes, SharedMemory, process_namespace
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb


def image(number: int) -> PreparedImage:
    feature = Feature("float32", (1, 2), bytes(range(8)))
    return PreparedImage(bytes([number]) * 32, "<image>" * 4, 4, (1, 2, 2), {"pixel_values": feature})


def new(request_id: int, cache_len: int, *images: tuple[PreparedImage, int]) -> NewRequest:
    placed = tuple(PlacedImage(one, ImagePlace(one.key, start, 4)) for one, start in images)
    request = make_request("a", 20, 5, images=placed)
    return NewRequest(request_id, request, [1, 2], cache_len=cache_len)


def sent(*requests: NewRequest) -> Any:
    return convert.prefill_to(PrefillCall(NewBatch(1, list(requests)))).batch


def test_places_and_arrays() -> None:
    one, two = image(1), image(2)
    batch = sent(new(0, 0, (one, 2), (two, 8), (one, 14)))
    assert [(place.key, place.start, place.length) for place in batch.requests[0].images] == [
        (one.key, 2, 4), (two.key, 8, 4), (one.key, 14, 4),
    ]  # fmt: skip
    assert [found.key for found in batch.images] == [one.key, two.key]
    (feature,) = batch.images[0].features
    assert (feature.name, feature.dtype, list(feature.shape), feature.data) == (
        "pixel_values", "float32", [1, 2], bytes(range(8)),
    )  # fmt: skip
    assert list(batch.images[0].grid) == [1, 2, 2] and batch.images[0].num_embeds == 4


@pytest.mark.parametrize(("cache_len", "has_features"), [(5, True), (6, False), (7, False)])
def test_a_cached_image_comes_without_arrays(cache_len: int, has_features: bool) -> None:
    batch = sent(new(0, cache_len, (image(1), 2)))
    (found,) = batch.images
    assert bool(found.features) == has_features and list(found.grid) == [1, 2, 2]
    assert len(batch.requests[0].images) == 1


def test_one_request_that_needs_the_arrays_is_enough() -> None:
    one = image(1)
    (found,) = sent(new(0, 8, (one, 2)), new(1, 0, (one, 2)), new(2, 8, (one, 2))).images
    assert found.features


def test_arrays_in_shared_memory_are_named_and_not_sent() -> None:
    memory = SharedMemory.create()
    memory.write(0, bytes(100) + bytes(range(8)))
    feature = Feature("float32", (1, 2), SharedBytes(memory, 100, 8))
    one = PreparedImage(b"a" * 32, "<image>" * 4, 4, (1, 2, 2), {"pixel_values": feature})
    (found,) = sent(new(0, 0, (one, 2))).images[0].features
    assert (found.memory, found.offset, found.num_bytes, found.data) == (memory.name, 100, 8, b"")


@pytest.mark.parametrize(
    ("namespaces", "shares"), [(("", ""), False), (("own", "other"), False), (("own", "own"), True)]
)
def test_memory_is_shared_only_where_every_rank_sees_the_router(namespaces: tuple[str, str], shares: bool) -> None:
    messages = [
        pb.InfoResponse(protocol=PROTOCOL, process_namespace=process_namespace() if one == "own" else one)
        for one in namespaces
    ]
    assert convert.info_from(messages).shares_memory == shares


class SlowClient:
    """A shard that answers when the test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[pb.PrefillResponse] = asyncio.get_running_loop().create_future()
        self.sent: Any = None

    def send(self, rpc: str, request: Any, timeout_s: float | None = None) -> Awaitable[Any]:
        self.sent = request
        return self.answer

    async def close(self) -> None: ...


async def test_arrays_stay_until_all_shards_have_answered_also_without_their_client() -> None:
    memory = SharedMemory.create()
    name = memory.name
    feature = Feature("float32", (1, 2), SharedBytes(memory, 0, 8))
    one = PreparedImage(b"a" * 32, "<image>" * 4, 4, (1, 2, 2), {"pixel_values": feature})
    clients = [SlowClient(), SlowClient()]
    pool = ShardPool(clients)
    reply = pool.prefill(PrefillCall(NewBatch(1, [new(0, 0, (one, 2))])))
    assert clients[1].sent.batch.images[0].features[0].memory == name
    del memory, feature, one
    clients[0].answer.set_result(pb.PrefillResponse())
    await asyncio.sleep(0)
    SharedMemory.open(name)  # the second one is yet to open it
    clients[1].answer.set_result(pb.PrefillResponse())
    await reply
    del reply
    with pytest.raises(OSError, match=r".*"):
        SharedMemory.open(name)
