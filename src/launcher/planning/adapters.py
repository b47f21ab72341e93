"""What the slots for LoRA adapters take of a GPU. Pure."""

from __future__ import annotations

from launcher.config import LauncherConfig
from launcher.planning.model_info import ModelInfo
from wire.adapters import DEFAULT_RANK, DEFAULT_SLOTS, MAX_NEW_ROWS

_AFFINE_BYTES = 8
"""Of an output that adapters may multiply and shift."""


def slot_bytes(config: LauncherConfig, info: ModelInfo, num_shard: int, width: int) -> int:
    """Bytes on each of `num_shard` GPUs, each number of `width` bytes, where adapters may change all layers.

    0 without `--lora-root`, since which layers the adapters of `--lora-adapters` change is in their files, and for a
    model whose layers config.json does not say.
    """
    hidden, inner, vocab, layers = info.hidden_size, info.intermediate_size, info.vocab_size, info.num_layers
    heads, kv_heads, dim = info.num_heads, info.num_kv_heads, info.head_dim
    if config.lora_root is None or info.num_experts > 1 or info.latent_size is not None:
        return 0
    if not (hidden and inner and vocab and layers and heads and kv_heads and dim):
        return 0
    rank = config.lora_max_rank or DEFAULT_RANK
    attended, inner = heads * dim // num_shard, inner // num_shard
    outputs = attended + 2 * max(1, kv_heads // num_shard) * dim + 2 * inner + 2 * hidden
    inputs = 5 * hidden + attended + inner
    head = vocab // num_shard
    matrices = layers * (inputs + outputs) + hidden + head + vocab + hidden
    numbers = rank * matrices + 2 * MAX_NEW_ROWS * hidden
    each = numbers * width + (layers * outputs + head) * _AFFINE_BYTES
    return each * (config.lora_slots or DEFAULT_SLOTS)
