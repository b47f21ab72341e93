"""The paged cache: views, rows and sizes."""

from __future__ import annotations

import math

import pytest
import torch

from model_server.memory.kv_cache import FLOAT8, KvCache, KvShape, from_float8

CPU = torch.device("cpu")


SHAPE = KvShape(2, 3, 5)


def make(shape: KvShape = SHAPE, dtype: torch.dtype = torch.float32) -> KvCache:
    return KvCache((shape, shape), num_blocks=4, block_size=2, dtype=dtype, device=CPU)


def test_sizes() -> None:
    shape = KvShape(2, 3, 5)
    assert shape.row_width == 16
    assert shape.block_bytes(2, torch.bfloat16) == 2 * 32
    cache = make(shape, torch.bfloat16)
    assert cache.keys[0].shape == (4, 2, 2, 3)
    assert cache.values[1].shape == (4, 2, 2, 5)
    assert cache.rows[0].shape == (8, 16)
    assert cache.rows[0].nbytes == 4 * shape.block_bytes(2, torch.bfloat16)


def test_a_layer_that_keeps_the_newest_tokens_of_a_block_has_fewer_rows_of_its_own_type() -> None:
    shape = KvShape(1, 6, 0, newest=3, dtype=torch.bfloat16)
    assert [shape.rows_per_block(size) for size in (2, 3, 16)] == [2, 3, 3]
    cache = KvCache((SHAPE, shape), num_blocks=4, block_size=16, dtype=torch.float8_e4m3fn, device=CPU)
    assert cache.rows[1].shape == (4 * 3, 6)
    assert cache.rows[1].dtype == torch.bfloat16
    assert cache.rows[1].nbytes == 4 * shape.block_bytes(16, torch.float8_e4m3fn)
    assert cache.keys[1].shape == (4, 3, 1, 6)
    assert cache.values[1].numel() == 0


def test_keys_of_an_indexer_are_behind_those_of_attention() -> None:
    for value_in_key, attended in ((True, 6), (False, 10)):
        shape = KvShape(2, 3, 2, value_in_key=value_in_key, index_dim=4)
        assert (shape.attended_width, shape.row_width) == (attended, attended + 4)
        cache = make(shape)
        cache.rows[0].copy_(torch.arange(8 * (attended + 4)).view(8, -1))
        assert torch.equal(cache.keys[0].reshape(8, -1), cache.rows[0][:, :6])
        values = cache.keys[0][..., :2].flatten(2) if value_in_key else cache.rows[0][:, 6:10].view(4, 2, 4)
        assert torch.equal(cache.values[0].flatten(2), values)


def test_by_token_each_slot_is_a_block() -> None:
    cache = make(KvShape(1, 6, 4, value_in_key=True, index_dim=3))
    cache.rows[1].copy_(torch.arange(8 * 9).view(8, 9))
    view = cache.by_token()
    assert (view.num_blocks, view.block_size, view.shapes) == (8, 1, cache.shapes)
    assert torch.equal(view.keys[1], cache.rows[1][:, None, None, :6])
    for part in (*view.keys, *view.values):
        assert part.stride()[:2] == (9, 9)  # of a block and of a slot
    view.keys[1][5] = -1.0
    assert cache.rows[1][5].tolist() == [-1.0] * 6 + [51.0, 52.0, 53.0]


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


@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
def test_float8_is_bounded_and_rounded_to_the_nearest_even(dtype: torch.dtype, given: torch.dtype) -> None:
    cache, largest = make(dtype=dtype), torch.finfo(dtype).max
    numbers = [1e6, -1e6, math.inf, -math.inf, math.nan, 1.0, -0.5, 0.0]
    wanted = [largest, -largest, largest, -largest, math.nan, 1.0, -0.5, 0.0]
    # Of each type: halfway between two numbers, the even one of which is below in the first, above in the second.
    step = torch.finfo(dtype).eps
    numbers += [1 + step / 2, 1 + 3 * step / 2] + [0.0] * 6
    wanted += [1.0, 1 + 2 * step] + [0.0] * 6
    slots = torch.tensor([5])
    cache.write_rows(1, slots, torch.tensor([numbers], dtype=given))
    for decoded in (cache.rows[1][slots].float(), from_float8(cache.rows[1][slots], torch.float32)):
        torch.testing.assert_close(decoded, torch.tensor([wanted]), rtol=0, atol=0, equal_nan=True)
    assert not from_float8(cache.rows[1][:5], torch.float32).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", FLOAT8)
def test_every_byte_is_read_as_torch_reads_it(stored: torch.dtype, dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(stored).view(2, 128)
    assert torch.equal(from_float8(codes, dtype).nan_to_num(7), codes.to(dtype).nan_to_num(7))


def test_values_inside_of_keys_take_no_room() -> None:
    shape = KvShape(1, 5, 3, value_in_key=True)
    assert shape.row_width == 5
    cache = make(shape)
    assert cache.rows[0].shape == (8, 5)
    rows = torch.randn(2, 5)
    cache.write_rows(0, torch.tensor([6, 1]), rows)
    assert torch.equal(cache.keys[0][3, 0, 0], rows[0])
    assert torch.equal(cache.values[0][0, 1, 0], rows[1, :3])
