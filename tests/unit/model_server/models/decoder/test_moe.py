"""How experts are read from every store, by which rank, and what latent attention keeps of a token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.dict_reader import DictReader
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.errors import StartupError
from model_server.layers.experts.experts import ExpertWeights
from model_server.models.config import ModelConfig
from model_server.models.decoder.attention.mla import Mla
from model_server.models.decoder.expert_stores import (
    ExpertSizes,
    ExpertStore,
    FlatExperts,
    SeparateExperts,
    StackedExperts,
)
from model_server.models.decoder.loader import Loader
from model_server.models.families import spec_of

CPU = torch.device("cpu")
EXPERTS, HIDDEN, SIZE = 3, 4, 6


class Rank(ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


GATE, UP = torch.randn(EXPERTS, SIZE, HIDDEN), torch.randn(EXPERTS, SIZE, HIDDEN)
DOWN = torch.randn(EXPERTS, HIDDEN, SIZE)
GATE_BIAS, UP_BIAS, DOWN_BIAS = torch.randn(EXPERTS, SIZE), torch.randn(EXPERTS, SIZE), torch.randn(EXPERTS, HIDDEN)


def read(store: ExpertStore, tensors: dict[str, Tensor], group: ProcessGroup, expert: int = 2) -> ExpertWeights:
    loader = Loader(DictReader({f"layer.{name}": t for name, t in tensors.items()}), CPU, group)
    return store.read(loader, "layer.", expert, ExpertSizes(EXPERTS, HIDDEN, SIZE))


def separate() -> dict[str, Tensor]:
    parts = {"gate_proj": GATE, "up_proj": UP, "down_proj": DOWN}
    return {f"mlp.experts.{e}.{name}.weight": t[e] for name, t in parts.items() for e in range(EXPERTS)}


def flat() -> dict[str, Tensor]:
    return {"w1": GATE.flatten(0, 1), "v1": UP.flatten(0, 1), "w2": DOWN.transpose(1, 2).flatten(0, 1)}


def stacked(interleaved: bool) -> dict[str, Tensor]:
    up = torch.stack((GATE, UP), dim=2).flatten(1, 2) if interleaved else torch.cat((GATE, UP), dim=1)
    return {"up": up.transpose(1, 2), "down": DOWN.transpose(1, 2)}


STORES: list[tuple[ExpertStore, dict[str, Tensor]]] = [
    (SeparateExperts(), separate()),
    (FlatExperts("w1", "v1", "w2"), flat()),
    (StackedExperts("up", "down"), stacked(False)),
    (StackedExperts("up", "down", interleaved=True), stacked(True)),
    (StackedExperts("up", "down", rows_first=True), {"up": torch.cat((GATE, UP), dim=1), "down": DOWN}),
]


@pytest.mark.parametrize(("store", "tensors"), STORES)
@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2), (2, 3)])
def test_every_rank_reads_its_slice_of_an_expert(
    store: ExpertStore, tensors: dict[str, Tensor], rank: int, size: int
) -> None:
    share = slice(rank * SIZE // size, (rank + 1) * SIZE // size)
    weights = read(store, tensors, Rank(rank, size))
    assert torch.equal(weights.up.dequantize(torch.float32), torch.cat((GATE[2, share], UP[2, share])))
    assert torch.equal(weights.down.dequantize(torch.float32), DOWN[2, :, share])
    assert weights.up_bias is None
    assert weights.down_bias is None


def test_a_bias_behind_the_sum_counts_once() -> None:
    store = StackedExperts("up", "down", interleaved=True)
    biases = {"up_bias": torch.stack((GATE_BIAS, UP_BIAS), dim=2).flatten(1), "down_bias": DOWN_BIAS}
    first, second = (read(store, stacked(True) | biases, Rank(rank, 2)) for rank in (0, 1))
    assert first.down_bias is not None
    assert torch.equal(first.down_bias, DOWN_BIAS[2])
    assert second.down_bias is None
    assert second.up_bias is not None
    assert torch.equal(second.up_bias, torch.cat((GATE_BIAS[2, 3:], UP_BIAS[2, 3:])))


def test_what_cannot_be_divided_is_refused() -> None:
    with pytest.raises(StartupError, match="The choosen size 6 is not compatible with sharding on 4 shards"):
        read(SeparateExperts(), separate(), Rank(0, 4))


DEEPSEEK: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 5,
    "num_attention_heads": 128, "vocab_size": 129280, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip


def test_deepseek_v3_as_published() -> None:
    spec = spec_of(ModelConfig(DEEPSEEK))
    assert isinstance(spec.attention, Mla)
    assert [mlp is None for mlp in spec.mlps] == [True, True, True, False, False]
    assert spec.scale == pytest.approx(192**-0.5 * (0.1 * torch.tensor(40.0).log().item() + 1) ** 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n_group": 3}, r"`n_routed_experts` \(256\) is not a multiple of `n_group` \(3\)"),
        ({"topk_group": 9}, "`topk_group` is 9, but there are 8 groups"),
        ({"num_experts_per_tok": 257}, "`num_experts_per_tok` is 257, but there are 256 experts"),
        ({"first_k_dense_replace": -1}, "`first_k_dense_replace` must be a number of layers, got -1"),
        ({"scoring_func": "softmax"}, "`scoring_func` is served for deepseek_v3 as 'sigmoid' only, got 'softmax'"),
        ({"moe_layer_freq": 2}, "`moe_layer_freq` is served for deepseek_v3 as 1 only, got 2"),
        ({"model_type": "deepseek_v2", "norm_topk_prob": True}, "`norm_topk_prob` is served for deepseek_v2 as False"),
        (
            {"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "noaux_tc"},
            "'noaux_tc' is not served",
        ),
        ({"model_type": "deepseek_v32", "q_lora_rank": None}, "`q_lora_rank` is null, but an indexer reads"),
        (
            {"model_type": "deepseek_v32", "index_head_dim": 32},
            r"`index_head_dim` is 32, but `qk_rope_head_dim` \(64\)",
        ),
        (
            {"model_type": "deepseek_v32", "rope_interleave": False},
            "`rope_interleave` is served for deepseek_v32 as True",
        ),
        ({"model_type": "deepseek_v32", "indexer_rope_interleave": True}, "`indexer_rope_interleave` is served"),
        ({"model_type": "glm_moe_dsa", "layer_types": ["full_attention"] * 5}, "5 times one of indexed_attention"),
        ({"model_type": "glm_moe_dsa", "indexer_types": ["shared"] * 5}, "`indexer_types` must name 5 times full or"),
        ({"model_type": "phimoe", "num_experts_per_tok": 1}, "`num_experts_per_tok` must be 2 for phimoe"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": "all"}, "`mlp_only_layers` must be a list of layer numbers"),
        ({"model_type": "dbrx", "d_model": 8, "n_heads": 2, "n_layers": 1, "ffn_config": 3}, "must be an object"),
        ({"model_type": "llama4_text"}, "rope scaling 'yarn' is not served with `use_qk_norm`"),
    ],
)
def test_unusable_configs(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        spec_of(ModelConfig(DEEPSEEK | fields))


def test_latent_attention_stores_one_row_for_all_heads() -> None:
    """A head is 24 + 8 numbers wide, four heads are divided between two ranks; both keep all of 16 + 8 numbers."""
    small = DEEPSEEK | {
        "hidden_size": 32, "num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "q_lora_rank": None,
        "qk_nope_head_dim": 24, "v_head_dim": 12,
    }  # fmt: skip
    spec = spec_of(ModelConfig(small))
    shapes = {
        "q_proj.weight": (128, 32), "kv_a_proj_with_mqa.weight": (24, 32), "kv_a_layernorm.weight": (16,),
        "kv_b_proj.weight": (144, 16), "o_proj.weight": (32, 48),
    }  # fmt: skip
    tensors = {f"model.layers.0.self_attn.{name}": torch.randn(shape) for name, shape in shapes.items()}
    assert spec.attention is not None
    for rank in range(2):
        part = spec.attention.load(Loader(DictReader(tensors), CPU, Rank(rank, 2)), spec, 0)
        assert part.kv_shape.row_width == 24
        assert part.kv_shape.value_in_key
    with pytest.raises(StartupError, match="`num_heads`: 4 and `num_shards`: 3"):
        spec.attention.load(Loader(DictReader(tensors), CPU, Rank(0, 3)), spec, 0)
    wrong = tensors | {"model.layers.0.self_attn.kv_b_proj.weight": torch.randn(100, 16)}
    with pytest.raises(StartupError, match=r"kv_b_proj\.weight has shape \[100, 16\]; the config asks for 144"):
        spec.attention.load(Loader(DictReader(wrong), CPU, ProcessGroup()), spec, 0)
