"""Calls to a shard's socket beside the router's own: junk, batches that nobody has, slots outside of the cache.

Only calls that ask for something impossible: who may open the socket may also run the model.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
from hostile.target import Target

from wire.v3 import generate_pb2 as pb

_SERVICE = "/generate.v3.TextGenerationService/"
_METHODS = ("Health", "Info", "ServiceDiscovery", "FilterBatch", "Prefill", "Decode", "ClearCache", "Warmup", "Nothing")
_SERVER_FAULTS = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DATA_LOSS}
_NOBODYS = 2**62
"""Ids from here on are never given by the router."""
_JUNK = b"\xff\xff\xff\xff"
"""No tag of a field: no message begins with it."""


def grpc_calls(socket: Path) -> Callable[[Target, random.Random, int], Awaitable[Counter[str]]]:
    """The attack on that socket."""

    async def attack(target: Target, source: random.Random, count: int) -> Counter[str]:
        codes: Counter[str] = Counter()
        options = [("grpc.max_send_message_length", -1)]
        # Not grpc.aio: its poller outlives the event loop of an attack, and writes to file descriptors that are others'
        # by then.
        with grpc.insecure_channel(f"unix://{socket}", options=options) as channel:
            for _ in range(count):
                codes[await asyncio.to_thread(_call, channel, source)] += 1
        return codes

    return attack


def _call(channel: grpc.Channel, source: random.Random) -> str:
    method, message = _junk(source) if source.random() < 0.5 else _impossible(source)
    try:
        channel.unary_unary(_SERVICE + method)(message, timeout=60)
    except grpc.RpcError as error:
        assert error.code() not in _SERVER_FAULTS, (method, message[:200], error)
        return error.code().name
    return "OK"


def _junk(source: random.Random) -> tuple[str, bytes]:
    return source.choice(_METHODS), _JUNK + source.randbytes(source.choice([0, 10, 1000, 100_000]))


def _impossible(source: random.Random) -> tuple[str, bytes]:
    batch_id = _NOBODYS + source.randrange(2**61)
    message = source.choice(
        [
            ("Decode", pb.DecodeRequest(batch_ids=[batch_id] * source.randint(0, 3))),
            ("FilterBatch", pb.FilterBatchRequest(batch_id=batch_id, request_ids=[batch_id])),
            ("ClearCache", pb.ClearCacheRequest(id=batch_id)),
            ("Prefill", pb.PrefillRequest(batch=_batch(batch_id, source))),
        ]
    )
    return message[0], message[1].SerializeToString()


def _batch(batch_id: int, source: random.Random) -> pb.Batch:
    """Of a request whose blocks lie outside of the cache."""
    request = pb.Request(
        id=batch_id, input_ids=[source.choice([0, 2**32 - 1])] * source.choice([0, 1, 10_000]),
        parameters=pb.NextTokenChooserParameters(
            temperature=source.choice([0.0, -1.0, 1.0, float("nan"), float("inf")]), top_p=1, typical_p=1,
            repetition_penalty=source.choice([0.0, 1.0, -1.0, float("nan")]), seed=2**64 - 1,
        ),
        stopping_parameters=pb.StoppingCriteriaParameters(max_new_tokens=source.choice([0, 1, 2**32 - 1])),
        blocks=[2**32 - 1, source.randrange(2**31, 2**32)],
    )  # fmt: skip
    return pb.Batch(id=batch_id, requests=[request] * source.randint(1, 2))
