"""Whole decoders with kernels give what they give in plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parity.protocol import STEPS, prompts, run_protocol
from support.dict_reader import DictReader
from torch import Tensor

from model_server.attention.reference import ReferenceBackend
from model_server.distributed.placement import Placement
from model_server.layers.fused.choice import fused_for
from model_server.layers.fused.fused import Fused
from model_server.layers.fused.torch import TorchFused
from model_server.layers.fused.triton import TritonFused
from model_server.models.config import ModelConfig
from model_server.models.decoder.build import build
from model_server.models.decoder.decoder import Decoder
from model_server.models.families import spec_of

SIZES: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},  # norms of q and k
    "gemma2": {"model_type": "gemma2", "hidden_activation": "gelu_pytorch_tanh"},  # post norms, GELU
    "granite": {"model_type": "granite", "residual_multiplier": 0.5},
    "olmo2": {"model_type": "olmo2"},  # one norm over all heads of q and of k
    "cohere": {"model_type": "cohere"},  # layer norms, parallel halves
    "half rotated": {"model_type": "phi3", "partial_rotary_factor": 0.5},  # packed qkv and gate_up
}


def tensors(model_type: str) -> dict[str, Tensor]:
    """A checkpoint with every tensor that any of the families asks for, at random."""
    generator = torch.Generator().manual_seed(0)
    hidden, inner, dim, queries, keys = 48, 40, 16, 64, 32
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (100, hidden), "lm_head": (100, hidden)}
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model_type == "gemma2":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    elif model_type == "olmo2":
        norms = ["post_attention_layernorm", "post_feedforward_layernorm"]
    vectors: dict[str, tuple[int, ...]] = {"model.norm": (hidden,)}
    for index in range(3):
        prefix = f"model.layers.{index}."
        shapes |= {
            prefix + "self_attn.q_proj": (queries, hidden), prefix + "self_attn.k_proj": (keys, hidden),
            prefix + "self_attn.v_proj": (keys, hidden), prefix + "self_attn.o_proj": (hidden, queries),
            prefix + "self_attn.qkv_proj": (queries + 2 * keys, hidden),
            prefix + "mlp.gate_up_proj": (2 * inner, hidden),
            prefix + "mlp.gate_proj": (inner, hidden), prefix + "mlp.up_proj": (inner, hidden),
            prefix + "mlp.down_proj": (hidden, inner),
        }  # fmt: skip
        vectors |= {prefix + name: (hidden,) for name in norms}
        if model_type in ("qwen3", "olmo2"):
            wide = model_type == "olmo2"
            vectors[prefix + "self_attn.q_norm"] = (queries,) if wide else (dim,)
            vectors[prefix + "self_attn.k_norm"] = (keys,) if wide else (dim,)
    made = {f"{n}.weight": torch.randn(s, generator=generator) * 0.15 for n, s in shapes.items()}
    return made | {f"{n}.weight": 1 + 0.1 * torch.randn(s, generator=generator) for n, s in vectors.items()}


def model(name: str, device: torch.device, fused: Fused | None) -> Decoder:
    config = SIZES | MODELS[name]
    made = {n: t.to(device) for n, t in tensors(config["model_type"]).items()}
    return build(
        spec_of(ModelConfig(config)), DictReader(made), Placement(device, torch.float32), ReferenceBackend(),
        fused=fused,
    )  # fmt: skip


def test_kernels_are_chosen_where_they_can_run(device: torch.device) -> None:
    assert isinstance(fused_for(device, torch.bfloat16), TritonFused)
    assert isinstance(fused_for(device, torch.float64), TorchFused)


@pytest.mark.parametrize("name", MODELS)
def test_kernels_give_what_plain_torch_gives(device: torch.device, name: str) -> None:
    if device.type != "cpu":
        pytest.skip("the protocol's batches are on the CPU")
    sequences = prompts(100)
    kernels, plain = (
        run_protocol(model(name, device, fused), sequences, 4, steps=STEPS) for fused in (None, TorchFused())
    )
    for got, wanted in zip(kernels, plain, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
