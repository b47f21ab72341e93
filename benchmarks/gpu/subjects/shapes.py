"""Models without files: real models' sizes, to be filled with random weights; and toy ones of the same kinds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model_server.models.config import ModelConfig
from model_server.models.decoder.spec import Spec
from model_server.models.families import spec_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of a Llama, or of a Qwen 3 with experts if there are any."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int  # of one expert, if there are experts
    vocab: int
    tied: bool = False
    experts: int = 0
    top_k: int = 0
    positions: int = 131072

    @property
    def config(self) -> dict[str, Any]:
        """config.json as transformers 5 writes it."""
        fields: dict[str, Any] = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.ffn,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            "hidden_act": "silu",
            "tie_word_embeddings": self.tied,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if self.experts:
            fields |= {
                "model_type": "qwen3_moe",
                "architectures": ["Qwen3MoeForCausalLM"],
                "num_experts": self.experts,
                "num_experts_per_tok": self.top_k,
                "moe_intermediate_size": self.ffn,
                "norm_topk_prob": True,
            }
        return fields

    @property
    def spec(self) -> Spec:
        return spec_of(ModelConfig(self.config))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint and its shape."""
        query, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for index in range(self.layers):
            layer = f"model.layers.{index}."
            for norm in ("input_layernorm", "post_attention_layernorm"):
                found[f"{layer}{norm}.weight"] = (self.hidden,)
            found[f"{layer}self_attn.q_proj.weight"] = (query, self.hidden)
            found[f"{layer}self_attn.k_proj.weight"] = (keys, self.hidden)
            found[f"{layer}self_attn.v_proj.weight"] = (keys, self.hidden)
            found[f"{layer}self_attn.o_proj.weight"] = (self.hidden, query)
            if self.experts:
                found[f"{layer}self_attn.q_norm.weight"] = (self.head_dim,)
                found[f"{layer}self_attn.k_norm.weight"] = (self.head_dim,)
                found[f"{layer}mlp.gate.weight"] = (self.experts, self.hidden)
                for expert in range(self.experts):
                    found |= self._mlp(f"{layer}mlp.experts.{expert}.")
            else:
                found |= self._mlp(f"{layer}mlp.")
        found["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, self.hidden)
        return found

    def _mlp(self, prefix: str) -> dict[str, tuple[int, ...]]:
        return {
            f"{prefix}gate_proj.weight": (self.ffn, self.hidden),
            f"{prefix}up_proj.weight": (self.ffn, self.hidden),
            f"{prefix}down_proj.weight": (self.hidden, self.ffn),
        }


# Llama 3.2 1B, Llama 3.1 8B, Qwen 3 30B A3B.
LLAMA_1B = Shape(
    name="1B", hidden=2048, layers=16, heads=32, kv_heads=8, head_dim=64, ffn=8192, vocab=128256, tied=True
)
LLAMA_8B = Shape(name="8B", hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, ffn=14336, vocab=128256)
QWEN_MOE = Shape(
    name="MoE", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, ffn=768, vocab=151936, experts=128, top_k=8,
    positions=40960,
)  # fmt: skip

TOY = Shape(
    name="toy", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=320, tied=True, positions=2048
)
TOY_UNTIED = Shape(
    name="toy untied", hidden=64, layers=2, heads=4, kv_heads=1, head_dim=32, ffn=96, vocab=320, positions=2048
)
TOY_MOE = Shape(
    name="toy MoE", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=32, vocab=320, experts=8, top_k=2,
    positions=2048,
)  # fmt: skip


# For comparisons in float32, token by token: large enough for every kernel's main path, small enough for seconds.
SMALL = Shape(
    name="small", hidden=1024, layers=8, heads=16, kv_heads=4, head_dim=64, ffn=2816, vocab=32000, positions=8192
)


def by_size(tiny: bool) -> tuple[Shape, Shape, Shape]:
    """The small dense, the large dense and the expert shape of a run."""
    return (TOY, TOY_UNTIED, TOY_MOE) if tiny else (LLAMA_1B, LLAMA_8B, QWEN_MOE)
