"""The paged cache: views, rows and sizes."""

from __future__ import annotations

import torch

from model_server.memory.kv_cache import KvCache, KvShape

CPU = torch.device("cpu")


SHAPE = KvShape(2, 3, 5)


def make(shape: KvShape = SHAPE, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache((shape, shape), num_blocks=4, block_size=2, dtype=dtype, device=CPU)


def test_sizes() -> None:
    shape = KvShape(2, 3, 5)
    assert shape.row_width == 16
    assert shape.bytes_per_token(torch.bfloat16) == 32
    cache = make(shape, torch.bfloat16)
    assert cache.keys[0].shape == (4, 2, 2, 3)
    assert cache.values[1].shape == (4, 2, 2, 5)
    assert cache.rows[0].shape == (8, 16)
    assert cache.rows[0].nbytes == 8 * shape.bytes_per_token(torch.bfloat16)


def test_write_lands_in_its_slots_and_layer_only() -> None:
    cache = make()
    slots = torch.tensor([5, 2])
    key, value = torch.randn(2, 2, 3), torch.randn(2, 2, 5)
    cache.write(1, slots, key, value)
    assert torch.equal(cache.keys[1].reshape(8, 2, 3)[slots], key)
    assert torch.equal(cache.values[1].reshape(8, 2, 5)[slots], value)
    assert int(cache.rows[1].any(-1).sum()) == 2
    assert not cache.rows[0].any()


def test_write_rows_is_write() -> None:
    a, b = make(), make()
    slots = torch.tensor([7, 0, 3])
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 5)
    a.write(0, slots, key, value)
    b.write_rows(0, slots, torch.cat((key.flatten(1), value.flatten(1)), 1))
    assert torch.equal(a.rows[0], b.rows[0])
    assert torch.equal(a.keys[0], b.keys[0])


def test_values_inside_of_keys_take_no_room() -> None:
    shape = KvShape(1, 5, 3, value_in_key=True)
    assert shape.row_width == 5
    cache = make(shape)
    assert cache.rows[0].shape == (8, 5)
    rows = torch.randn(2, 5)
    cache.write_rows(0, torch.tensor([6, 1]), rows)
    assert torch.equal(cache.keys[0][3, 0, 0], rows[0])
    assert torch.equal(cache.values[0][0, 1, 0], rows[1, :3])
