"""What Info announces follows from the runner."""

from __future__ import annotations

from typing import Any, cast

from model_server.rpc.servicer import Servicer, ShardFacts
from wire.processes.shared_memory import process_namespace
from wire.protocol import PROTOCOL
from wire.v3 import generate_pb2 as pb


def facts(**changes: Any) -> ShardFacts:
    usual: dict[str, Any] = {
        "dtype": "torch.float32",
        "device_type": "cpu",
        "attention_impl": "paged",
        "block_size": 16,
        "chunking": True,
        "prefix_caching": True,
        "grows": True,
        "urls": (),
        "kv_cache_dtype": "torch.float8_e4m3fn",
        "quantize": "gptq",
    }
    return ShardFacts(**usual | changes)


async def info(known: ShardFacts) -> pb.InfoResponse:
    servicer = Servicer(cast(Any, None), cast(Any, None), known, cast(Any, None))
    return cast(pb.InfoResponse, await servicer.Info(pb.InfoRequest(), cast(Any, None)))


async def test_a_paged_runner_offers_everything() -> None:
    answer = await info(facts(speculate=5, images=True, loads_adapters=True))
    plain = await info(facts())
    assert answer.protocol == plain.protocol == PROTOCOL
    assert (answer.grows, answer.images, answer.loads_adapters) == (True, True, True)
    assert (plain.grows, plain.images, plain.loads_adapters) == (True, False, False)
    assert answer.pipeline_depth == 2
    assert answer.kv_cache_dtype == "torch.float8_e4m3fn"
    assert answer.quantize == "gptq"
    assert not (await info(facts(quantize=None))).HasField("quantize")
    assert not answer.HasField("speculator") and (await info(facts(speculator="eagle3"))).speculator == "eagle3"
    assert answer.process_namespace == process_namespace() and not plain.process_namespace
    assert (answer.image_reserve, (await info(facts(image_reserve=70))).image_reserve) == (0, 70)
    assert not answer.HasField("adapter_slots") and (await info(facts(adapter_slots=3))).adapter_slots == 3
    assert answer.support_chunking and answer.prefix_caching


async def test_a_runner_with_states_offers_neither_chunks_nor_prefixes_nor_more_blocks() -> None:
    known = facts(chunking=False, prefix_caching=False, grows=False, speculate=1, images=True, loads_adapters=True)
    answer = await info(known)
    assert not (answer.grows or answer.support_chunking or answer.prefix_caching)
    assert answer.block_size == 16
