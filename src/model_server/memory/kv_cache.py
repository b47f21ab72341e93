"""The paged KV cache of one rank: per layer one tensor of blocks that holds K and V side by side.

Who owns what: the router hands out blocks and slots, this file owns the memory, the model writes, attention backends
read. Block 0 is never handed out: padding and probes write there.
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
    """What one layer stores for one token on this rank.

    value_in_key: nothing is stored for values; a value is the first `value_dim` numbers of its key (latent attention).
    newest: for how many of a block's tokens, the newest ones, there is a row: the token at position p has row
    p % newest of its block, in place of the token at p - newest (layers that read a few tokens back); None: for all.
    dtype: of the rows; None: the cache's.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    value_in_key: bool = False
    newest: int | None = None
    dtype: torch.dtype | None = None

    @property
    def row_width(self) -> int:
        """Numbers stored per token: all key heads, then all value heads."""
        if self.value_in_key:
            return self.num_kv_heads * self.key_dim
        return self.num_kv_heads * (self.key_dim + self.value_dim)

    def rows_per_block(self, block_size: int) -> int:
        return block_size if self.newest is None else min(self.newest, block_size)

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """What a block of `block_size` tokens takes in a cache of `dtype`."""
        return self.rows_per_block(block_size) * self.row_width * (self.dtype or dtype).itemsize


class KvCache:
    """Keys and values of all layers: `keys[layer]` is [num_blocks, block_size, num_kv_heads, key_dim], values alike.

    Both are views of `rows[layer]` [num_blocks * block_size, row_width]: a token's keys and values are in one row, so
    that one copy writes and one gather reads both. Only the last dimension of the views is contiguous. A layer whose
    shape says so has fewer rows in a block (`KvShape.newest`).
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
                values = blocks[..., key_width:].view(num_blocks, in_block, shape.num_kv_heads, shape.value_dim)
            self.rows.append(rows)
            self.keys.append(keys)
            self.values.append(values)

    @classmethod
    def scratch(
        cls, shapes: tuple[KvShape, ...], num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KvCache:
        """For steps that leave nothing behind: layers of equal shape share their memory, one after the other."""
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
        """Some of the layers as a cache of their own, in the same memory."""
        part = KvCache((), self.num_blocks, self.block_size, torch.uint8, torch.device("cpu"))
        chosen = slice(first, first + count)
        part.shapes, part.rows = self.shapes[chosen], self.rows[chosen]
        part.keys, part.values = self.keys[chosen], self.values[chosen]
        return part

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store key and value [num_tokens, num_kv_heads, dim] of one layer at `slots` [num_tokens] int64.

        Not for shapes with `value_in_key`, whose rows are the keys.
        """
        self.write_rows(layer, slots, torch.cat((key.flatten(1), value.flatten(1)), dim=1))

    def write_rows(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` [num_tokens, row_width], keys then values of each token, at `slots` [num_tokens] int64."""
        copy_rows(self.rows[layer], slots, rows)


def copy_rows(cache: Tensor, slots: Tensor, rows: Tensor) -> None:
    """`rows` [n, width] to `slots` [n] int64 of `cache` [num_slots, width], in the type of the cache.

    In float8 numbers are bounded by the largest of the type and rounded to the nearest even; NaN stays NaN.
    """
    if cache.dtype in FLOAT8:
        if rows.dtype is not cache.dtype:
            bound = torch.finfo(cache.dtype).max
            rows = rows.clamp(-bound, bound).to(cache.dtype)
        # As bytes: torch copies rows by index in whole bytes on every device, in float8 only on some.
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    cache.index_copy_(0, slots, rows)


def from_float8(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """`numbers` of a type of FLOAT8, contiguous, in `dtype`."""
    if numbers.device.type != "cpu":
        return numbers.to(dtype)
    # torch converts one number at a time here; looking it up is four times as fast.
    codes = numbers.view(torch.uint8).flatten().int()
    return _table(numbers.dtype, dtype).index_select(0, codes).view(numbers.shape)


@lru_cache
def _table(stored: torch.dtype, dtype: torch.dtype) -> Tensor:
    """[256]: the number that each byte of a type of FLOAT8 stands for."""
    return torch.arange(256, dtype=torch.uint8).view(stored).to(dtype)


def _zeros(num_rows: int, row_width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type == "cpu":
        return huge_pages.zeros(num_rows, row_width, dtype=dtype)
    return torch.zeros(num_rows, row_width, dtype=dtype, device=device)
