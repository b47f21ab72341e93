"""What clients read of adapters that shards refuse: the routes above the shards' own checks, as with slots on a GPU."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.adapters import write_adapter
from support.loading import load
from support.tiny_models import tiny_checkpoint
from tokenizers import Tokenizer
from unit.router.router_fakes import Router

from model_server.features.adapters.load import adapter_of, with_adapters
from model_server.features.adapters.residents import Residents
from model_server.models.model import describe
from model_server.rpc.lora import LoraServicer
from model_server.weights.checkpoint import examine
from router.config import RouterConfig
from router.lora.registry import AdapterRegistry
from router.metrics import Metrics
from router.shards.pool import ShardPool

LAYER = "model.layers.1.block_sparse_moe"


class Shard:
    """A client of the pool, without gRPC between them."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer

    def send(self, rpc: str, request: Any, timeout_s: float | None = None) -> Any:
        assert rpc == "LoadAdapter"
        return asyncio.ensure_future(self._servicer.Load(request, None))


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    root = tmp_path_factory.mktemp("root")
    model = tiny_checkpoint("mixtral", tmp_path_factory.mktemp("model"))
    runner: Any = load(model, adapter_room=2, adapter_slots=1)
    described = with_adapters(describe(examine(model)), {}, room=2, max_rank=8)
    residents = Residents(runner.adapters, range(2), root, lambda name, path: adapter_of(described, name, path), 4)
    write_adapter(root / "attention", {"model.layers.1.self_attn.q_proj": (64, 64)})
    write_adapter(root / "large", {"model.layers.1.self_attn.q_proj": (64, 64)}, rank=16)
    write_adapter(root / "single", {f"{LAYER}.experts.2.w2": (96, 64)})
    outer = "base_model.model.model.layers.0.mlp.experts.lora_"
    write_adapter(
        root / "all", {}, tensors={outer + "A.weight": torch.ones(16, 96), outer + "B.weight": torch.ones(64, 16)}
    )
    pool = ShardPool([Shard(LoraServicer(residents, None))])  # type: ignore[arg-type,list-item]
    registry = AdapterRegistry([], Metrics(), pool, most_bytes=10**9)
    config = RouterConfig(tokenizer_name="some/model", api_key="secret", lora_root=str(root))
    made = Router(Tokenizer.from_file(str(model / "tokenizer.json")), config=config, adapters=registry)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("folder", "texts"),
    [
        (
            "single",
            (f"{LAYER}.experts.2.w2 belongs to experts", "start the server with this adapter in --lora-adapters"),
        ),
        ("all", ("mlp.experts.down_proj belongs to experts", "start the server with this adapter in --lora-adapters")),
        ("large", ("rank 16 is above --lora-max-rank 8",)),
    ],
)
async def test_what_there_are_no_slots_for_is_refused_with_what_to_do(
    router: Router, folder: str, texts: tuple[str, ...]
) -> None:
    key = {"authorization": "Bearer secret"}
    answer = await router.post("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": folder}, **key)
    error = answer.json()["error"]["message"]
    assert answer.status_code == 400 and error.startswith("LoRA adapter `x`: "), error
    assert all(text in error for text in texts), error
    asked = {"inputs": "Hi", "parameters": {"adapter_id": "x"}}
    assert (await router.post("/generate", asked, **key)).status_code == 422, "it is not registered"


async def test_an_adapter_of_attention_is_taken(router: Router) -> None:
    body = {"lora_name": "y", "lora_path": "attention"}
    answer = await router.post("/v1/load_lora_adapter", body, authorization="Bearer secret")
    assert answer.status_code == 200, answer.text
    asked = {"inputs": "Hi", "parameters": {"adapter_id": "y", "max_new_tokens": 2}}
    assert (await router.post("/generate", asked, authorization="Bearer secret")).status_code == 200
    assert router.scheduler.last.adapter == 1
