"""The paged KV cache of one rank: a tensor of blocks per layer, with K and V side by side.

The router hands out blocks and slots, the model writes, attention reads. Padding and probes write to block 0, which is
never handed out.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from model_server.memory import huge_pages

# Types of a cache that are narrower than the model's: what is stored is divided by a scale, which reading makes up for.
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class KvShape:
    """What one layer stores for a token on this rank."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    # A value is the first `value_dim` numbers of its key (latent attention).
    value_in_key: bool = False
    # Rows for so many of a block's newest tokens, p at p % newest (layers that read a few tokens back); None: all.
    newest: int | None = None
    # Of the rows; None: the cache's.
    dtype: torch.dtype | None = None
    # Numbers behind keys and values: what an indexer compares queries with.
    index_dim: int = 0

    @property
    def attended_width(self) -> int:
        """Return numbers per token that attention reads: key heads, then value heads."""
        if self.value_in_key:
            return self.num_kv_heads * self.key_dim
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    @property
    def row_width(self) -> int:
        return self.attended_width + self.index_dim

    def rows_per_block(self, block_size: int) -> int:
        return block_size if self.newest is None else min(self.newest, block_size)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return self.rows_per_block(block_size) * self.row_width * (self.dtype or dtype).itemsize


class KvCache:
    """Keys and values of all layers, [num_blocks, block_size, num_kv_heads, dim] each.

    Both are views of `rows[layer]` [num_blocks * block_size, row_width], so that one copy writes and one gather reads
    both; only the last dimension is contiguous.
    """

    def __init__(
        self, shapes: tuple[KvShape, ...], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shapes = shapes
        self.rows: list[Tensor] = []
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for shape in shapes:
            # Zeros, not empty: a kernel may read a block's unwritten tail and mask it, and 0 * NaN would be NaN.
            in_block = shape.rows_per_block(block_size)
            rows = _zeros(num_blocks * in_block, shape.row_width, shape.dtype or dtype, device)
            blocks = rows.view(num_blocks, in_block, shape.row_width)
            key_width = shape.num_kv_heads * shape.key_dim
            keys = blocks[..., :key_width].view(num_blocks, in_block, shape.num_kv_heads, shape.key_dim)
            if shape.value_in_key:
                values = keys[..., : shape.value_dim]
            else:
                values = blocks[..., key_width : shape.attended_width]
                values = values.view(num_blocks, in_block, shape.num_kv_heads, shape.value_dim)
            self.rows.append(rows)
            self.keys.append(keys)
            self.values.append(values)

    @classmethod
    def scratch(
        cls, shapes: tuple[KvShape, ...], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KvCache:
        """Make a cache for steps that leave nothing: layers of equal shape share memory."""
        distinct = tuple(dict.fromkeys(shapes))
        shared = cls(distinct, num_blocks, block_size, dtype, device)
        whole = cls((), num_blocks, block_size, dtype, device)
        places = [distinct.index(shape) for shape in shapes]
        whole.shapes = shapes
        whole.rows = [shared.rows[place] for place in places]
        whole.keys = [shared.keys[place] for place in places]
        whole.values = [shared.values[place] for place in places]
        return whole

    def layers(self, first: int, count: int) -> KvCache:
        """View some layers as a cache."""
        part = KvCache((), self.num_blocks, self.block_size, torch.uint8, torch.device("cpu"))
        chosen = slice(first, first + count)
        part.shapes, part.rows = self.shapes[chosen], self.rows[chosen]
        part.keys, part.values = self.keys[chosen], self.values[chosen]
        return part

    def by_token(self) -> KvCache:
        """View it with a block for each slot."""
        view = self.layers(0, len(self.shapes))
        view.num_blocks, view.block_size = self.num_blocks * self.block_size, 1
        # Kernels step from slot to slot by the stride inside of a block.
        for parts in (view.keys, view.values):
            parts[:] = [t.flatten(0, 1).unfold(0, 1, 1).movedim(-1, 1) for t in parts]
        return view

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, dim] at `slots` [num_tokens] int64; not with
        `value_in_key`.
        """
        self.write_rows(layer, slots, torch.cat((key.flatten(1), value.flatten(1)), dim=1))

    def write_rows(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` [num_tokens, row_width] at `slots` [num_tokens] int64."""
        copy_rows(self.rows[layer], slots, rows)


def copy_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Copy `rows` [n, width] to `slots` [n] of `cache`, in its type; float8 is bounded and rounded to even."""
    if cache.dtype in FLOAT8:
        if rows.dtype is not cache.dtype:
            bound = torch.finfo(cache.dtype).max
            rows = rows.clamp(-bound, bound).to(cache.dtype)
        # As bytes: torch copies rows by index in whole bytes on every device, in float8 only on some.
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache.index_copy_(0, slots, rows)


def from_float8(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert contiguous FLOAT8 numbers."""
    if numbers.device.type != "cpu":
        return numbers.to(dtype)
    # torch converts one number at a time here; looking it up is four times as fast.
    codes = numbers.view(torch.uint8).flatten().int()
    return _table(numbers.dtype, dtype).index_select(0, codes).view(numbers.shape)


@lru_cache
def _table(stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Return the numbers of all 256 bytes of a FLOAT8 type."""
    return torch.arange(256, dtype=torch.uint8).view(stored).to(dtype)


def _zeros(num_rows: int, row_width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return huge_pages.zeros(num_rows, row_width, dtype=dtype)
    return torch.zeros(num_rows, row_width, dtype=dtype, device=device)
