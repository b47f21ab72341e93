"""What Info announces follows from the runner."""

from __future__ import annotations

from typing import Any, cast

from model_server.rpc.servicer import Servicer, ShardFacts
from wire.extensions import Extension
from wire.processes.shared_memory import process_namespace
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
    assert list(answer.extensions) == list(Extension)
    assert not {Extension.PREDICTION, Extension.IMAGES, Extension.LORA, Extension.SHARED_MEMORY} & set(
        (await info(facts())).extensions
    )
    assert answer.pipeline_depth == 2
    assert answer.kv_cache_dtype == "torch.float8_e4m3fn"
    assert answer.quantize == "gptq"
    assert not (await info(facts(quantize=None))).HasField("quantize")
    assert not answer.HasField("speculator") and (await info(facts(speculator="eagle3"))).speculator == "eagle3"
    assert answer.process_namespace == process_namespace() and not (await info(facts())).process_namespace
    assert not answer.HasField("image_reserve") and (await info(facts(image_reserve=70))).image_reserve == 70
    assert not answer.HasField("adapter_slots") and (await info(facts(adapter_slots=3))).adapter_slots == 3
    assert answer.support_chunking and (await info(facts())).use_prefix_caching
    assert answer.adapter_prefix_caching and not answer.use_prefix_caching  # TGI's router cannot tell images apart


async def test_a_runner_with_states_offers_neither_chunks_nor_prefixes_nor_growth() -> None:
    known = facts(chunking=False, prefix_caching=False, grows=False, speculate=1, images=True, loads_adapters=True)
    answer = await info(known)
    assert Extension.GROW not in answer.extensions
    assert set(answer.extensions) == set(Extension) - {Extension.GROW}
    assert not answer.support_chunking and not answer.use_prefix_caching
    assert answer.block_size == 16
