"""Shape of the demo model, and the files in which it ships."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model import tokenizer

# In the form that readers of several years understand: `torch_dtype` and `rope_theta` instead of the newer names.
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": tokenizer.SPECIAL.index(tokenizer.BOS),
    "eos_token_id": tokenizer.SPECIAL.index(tokenizer.END),
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 704,
    "max_position_embeddings": tokenizer.MAX_LENGTH,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 5,
    "num_key_value_heads": 2,
    "pad_token_id": tokenizer.SPECIAL.index(tokenizer.PAD),
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": tokenizer.VOCABULARY,
}


def fresh(seed: int = 0) -> LlamaForCausalLM:
    """An untrained model in float32."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**{key: value for key, value in CONFIG.items() if key != "torch_dtype"}))


def write(model: LlamaForCausalLM, folder: Path) -> None:
    """Weights in bfloat16, config and generation config; the tokenizer files are written by `tokenizer.py`."""
    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it private to its owner
    _dump(CONFIG, folder / "config.json")
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    _dump({name: CONFIG[name] for name in names}, folder / "generation_config.json")


def _dump(value: dict[str, Any], path: Path) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
