"""The paged KV cache of one rank: per layer one K and one V tensor of blocks.

Who owns what: the router hands out blocks and slots, this file owns the memory, attention backends write and read it.
Block 0 is never handed out: padding and probes write there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer stores for one token on this rank."""

    num_kv_heads: int
    key_dim: int
    value_dim: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return self.num_kv_heads * (self.key_dim + self.value_dim) * dtype.itemsize


class KvCache:
    """Keys and values of all layers: `keys[layer]` is [num_blocks, block_size, num_kv_heads, key_dim], values alike."""

    def __init__(
        self, shapes: tuple[KvShape, ...], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, not empty: a block's unwritten tail is read (and masked) by attention, and 0 * NaN would be NaN.
        self.keys: list[Tensor] = [
            torch.zeros(num_blocks, block_size, s.num_kv_heads, s.key_dim, dtype=dtype, device=device) for s in shapes
        ]
        self.values: list[Tensor] = [
            torch.zeros(num_blocks, block_size, s.num_kv_heads, s.value_dim, dtype=dtype, device=device)
            for s in shapes
        ]

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, dim] of one layer at `slots` [num_tokens] int64."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)
