"""What a rank reads of each packing, which norm a weight's shape means, and descriptions that replace a part."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.dict_reader import DictReader
from support.linears import make_linear
from torch import Tensor

from model_server.attention.reference import ReferenceBackend
from model_server.distributed.group import ProcessGroup
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import LayerNorm, RmsNorm, WideRmsNorm
from model_server.memory.kv_cache import KvShape
from model_server.models.config import ModelConfig
from model_server.models.decoder.attention.multi_head import Attention, head_ranges, load_attention, qkv_parts
from model_server.models.decoder.build import build
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.mlp import load_mlp
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.models.families import spec_of
from model_server.weights.matrix import Part

CPU = torch.device("cpu")


class Rank(ProcessGroup):
    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def spec(**differences: Any) -> Spec:
    """Four query heads and two key heads of two numbers."""
    config = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 16,
    }  # fmt: skip
    return dataclasses.replace(spec_of(ModelConfig(config)), **differences)


def names(*qkv: str) -> Any:
    return dataclasses.replace(spec().names, qkv=qkv)


def heads(parts: list[Part], dim: int = 2) -> list[tuple[str, list[int]]]:
    """(tensor, places of the heads in it) of each part."""
    return [(p.name, [h for a, b in p.rows for h in range(a // dim, b // dim)]) for p in parts]


PACKINGS: list[tuple[dict[str, Any], int, int, list[tuple[str, list[int]]]]] = [
    ({"names": names("q", "k", "v")}, 1, 2, [("q", [2, 3]), ("k", [1]), ("v", [1])]),
    ({"names": names("q", "kv")}, 1, 2, [("q", [2, 3]), ("kv", [1]), ("kv", [3])]),
    ({"names": names("x")}, 0, 1, [("x", [0, 1, 2, 3]), ("x", [4, 5]), ("x", [6, 7])]),
    ({"names": names("x")}, 1, 2, [("x", [2, 3]), ("x", [5]), ("x", [7])]),
    ({"names": names("x")}, 3, 4, [("x", [3]), ("x", [5]), ("x", [7])]),
    ({"names": names("x"), "packing": "grouped"}, 0, 1, [("x", [0, 1, 4, 5]), ("x", [2, 6]), ("x", [3, 7])]),
    ({"names": names("x"), "packing": "grouped"}, 2, 4, [("x", [4]), ("x", [6]), ("x", [7])]),
    (
        {"names": names("x"), "packing": "grouped", "num_kv_heads": 4},
        1, 2, [("x", [6, 9]), ("x", [7, 10]), ("x", [8, 11])],
    ),
    ({"names": names("x"), "packing": "grouped", "num_kv_heads": 1}, 1, 2, [("x", [2, 3]), ("x", [4]), ("x", [5])]),
]  # fmt: skip


@pytest.mark.parametrize(("differences", "rank", "size", "wanted"), PACKINGS)
def test_heads_of_every_packing(
    differences: dict[str, Any], rank: int, size: int, wanted: list[tuple[str, list[int]]]
) -> None:
    model = spec(**differences)
    parts = qkv_parts(model, "", *head_ranges(model, Rank(rank, size)), None)
    assert heads(parts) == wanted
    totals = {part.name: part.num_rows for part in parts}
    assert sum(totals.values()) == 2 * (model.num_heads + 2 * model.num_kv_heads)


def tensors(model: Spec, **others: Tensor) -> dict[str, Tensor]:
    """Layer 0 of a Llama of these sizes."""
    prefix = "model.layers.0."
    shapes = {
        "self_attn.q_proj": (8, 8), "self_attn.k_proj": (4, 8), "self_attn.v_proj": (4, 8), "self_attn.o_proj": (8, 8),
        "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12),
    }  # fmt: skip
    made = {f"{prefix}{n}.weight": torch.randn(s) for n, s in shapes.items()}
    return made | {prefix + name.replace("__", "."): tensor for name, tensor in others.items()}


def attention(model: Spec, group: ProcessGroup | None = None, **others: Tensor) -> Attention:
    group = group or ProcessGroup()
    loader = Loader(DictReader(tensors(model, **others)), CPU, group, model.norm, model.norm_eps, model.norm_offset)
    return load_attention(loader, model, 0)


def test_the_shape_of_a_weight_tells_the_norm_of_q_and_k() -> None:
    def q_and_k(q: Tensor, k: Tensor) -> dict[str, Tensor]:
        return {"self_attn__q_norm__weight": q, "self_attn__k_norm__weight": k}

    assert attention(spec()).qk_norm is None
    shared = q_and_k(torch.randn(2), torch.randn(2))
    assert isinstance(attention(spec(), **shared).qk_norm, RmsNorm)
    assert isinstance(attention(spec(norm="layer"), **shared).qk_norm, LayerNorm)
    own = q_and_k(torch.randn(4, 2), torch.randn(2, 2))
    assert isinstance(attention(spec(norm="layer"), Rank(1, 2), **own).qk_norm, LayerNorm)
    wide = q_and_k(torch.randn(8), torch.randn(4))
    assert isinstance(attention(spec(), **wide).qk_norm, WideRmsNorm)
    with pytest.raises(StartupError, match="a norm over all heads is served as a plain RMS norm only"):
        attention(spec(norm="layer"), **wide)


def test_sinks_are_those_of_the_ranks_heads() -> None:
    model = spec(names=dataclasses.replace(spec().names, sinks="self_attn.sinks"))
    loaded = attention(model, Rank(1, 2), self_attn__sinks=torch.tensor([1.0, 2.0, 3.0, 4.0]))
    assert loaded.layer.sinks is not None
    assert loaded.layer.sinks.tolist() == [3.0, 4.0]
    assert attention(model).layer.sinks is None


def test_chunks_scales_and_slopes_of_a_layer() -> None:
    model = spec(chunks=(8, None), scale_by_inverse_layer=True, scale=0.5, alibi=(1.0, 2.0, 3.0, 4.0))
    layer = attention(model, Rank(1, 2)).layer
    assert (layer.chunk, layer.scale) == (8, 0.5)
    assert layer.alibi is not None
    assert layer.alibi.slopes.tolist() == [3.0, 4.0]
    loader = Loader(DictReader({}), CPU, ProcessGroup())
    assert loader.alibi((1.0,), None) is loader.alibi((1.0,), None)
    assert loader.alibi((1.0,), None) is not loader.alibi((1.0,), 0.5)


@pytest.mark.parametrize("transposed", [False, True])
def test_packed_gate_and_up_are_cut_alike(transposed: bool) -> None:
    """One rank's gate and up are its rows of both halves; stored [in, out] they are columns."""
    stored = tensors(spec())
    gate, up, down = (stored.pop(f"model.layers.0.mlp.{n}_proj.weight") for n in ("gate", "up", "down"))
    packed = torch.cat((gate, up))
    stored["model.layers.0.mlp.gate_up_proj.weight"] = packed.t() if transposed else packed
    stored["model.layers.0.mlp.down_proj.weight"] = down.t() if transposed else down
    model = spec(names=dataclasses.replace(spec().names, up=("mlp.gate_up_proj",)), transposed=transposed)
    x = torch.randn(3, 8)
    parts = [load_mlp(Loader(DictReader(stored), CPU, Rank(r, 2)), model, 0)(x, None) for r in range(2)]  # type: ignore[arg-type]
    wanted = (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
    torch.testing.assert_close(parts[0] + parts[1], wanted)


def test_wrong_number_of_heads_in_a_file() -> None:
    model = spec(names=names("self_attn.qkv_proj"))
    with pytest.raises(
        StartupError, match=r"qkv_proj.weight has shape \[12, 8\]; the config asks for 16 at dimension 0"
    ):
        attention(model, self_attn__qkv_proj__weight=torch.randn(12, 8))


@dataclasses.dataclass(frozen=True)
class OtherAttention:
    """An attention of another kind: forgets K and V, gives zeros."""

    output: Linear
    kv_shape: KvShape

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        return torch.zeros(len(hidden), self.kv_shape.value_dim)


class OtherAttentionSpec:
    def load(self, loader: Loader, spec: Spec, index: int) -> OtherAttention:
        return OtherAttention(make_linear(torch.zeros(spec.hidden_size, 4)), KvShape(1, 6, 4))


class OtherMlp:
    """An MLP of another kind: doubles what it reads."""

    capturable = False

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        return hidden * 2


class OtherMlpSpec:
    """Remembers which layers asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def load(self, loader: Loader, spec: Spec, index: int) -> OtherMlp:
        self.asked.append(index)
        return OtherMlp()


def test_descriptions_replace_attention_and_single_mlps() -> None:
    mlp_spec = OtherMlpSpec()
    model = spec(attention=OtherAttentionSpec(), mlps=(None, mlp_spec))
    prefix = "model.layers."
    stored = tensors(model) | {"model.embed_tokens.weight": torch.randn(16, 8), "model.norm.weight": torch.ones(8)}
    for index in range(2):
        for name in ("input_layernorm", "post_attention_layernorm"):
            stored[f"{prefix}{index}.{name}.weight"] = torch.ones(8)
    runner = build(model, DictReader(stored), Placement(CPU, torch.float32), ReferenceBackend())
    assert mlp_spec.asked == [1]
    assert runner.kv_shapes == (KvShape(1, 6, 4),) * 2


def test_learned_positions_must_reach_as_far_as_the_config_says() -> None:
    stored = {"model.embed_tokens.weight": torch.randn(16, 8), "wpe.weight": torch.randn(10, 8)}
    model = spec(names=dataclasses.replace(spec().names, positions="wpe"), max_positions=9, position_offset=2)
    with pytest.raises(StartupError, match=r"weight wpe\.weight has 10 rows; the config asks for 11"):
        build(model, DictReader(stored), Placement(CPU, torch.float32), ReferenceBackend())
