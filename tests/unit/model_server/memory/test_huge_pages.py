"""Memory for what every step reads: tensors side by side, large pages asked for, nothing kept that nobody needs."""

from __future__ import annotations

import gc
import itertools
import mmap
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model_server.memory import huge_pages
from model_server.memory.huge_pages import ALIGNMENT, CHUNK, PAGE, Arena
from model_server.memory.kv_cache import KvCache, KvShape

SMAPS = Path("/proc/self/smaps")


def flags_at(address: int) -> list[str]:
    """What the system knows of the mapping with this address (`VmFlags`)."""
    inside = False
    for line in SMAPS.read_text().splitlines():
        words = line.split()
        bounds = words[0].split("-")
        if len(bounds) == 2:
            inside = int(bounds[0], 16) <= address < int(bounds[1], 16)
        elif inside and words[0] == "VmFlags:":
            return words[1:]
    raise AssertionError(f"no mapping has {address:#x}")


def test_tensors_are_zeros_aligned_and_writable() -> None:
    arena = Arena()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = arena.zeros(3, 5, dtype=dtype)
        assert tensor.shape == (3, 5) and tensor.dtype == dtype and not tensor.any()
        assert tensor.data_ptr() % ALIGNMENT == 0
        tensor.fill_(7)
        assert not arena.zeros(100, dtype=dtype).any()
        assert (tensor == 7).all()


def test_an_empty_tensor_takes_nothing() -> None:
    assert Arena().zeros(0, 5, dtype=torch.float32).shape == (0, 5)


def test_small_tensors_share_a_page_and_begin_where_a_page_does() -> None:
    arena = Arena()
    first, second = (arena.zeros(1000, dtype=torch.float32) for _ in range(2))
    assert first.data_ptr() % PAGE == 0
    assert second.data_ptr() - first.data_ptr() == -(-4000 // ALIGNMENT) * ALIGNMENT


def test_a_tensor_larger_than_a_chunk_has_a_mapping_of_its_own() -> None:
    arena = Arena()
    small = arena.zeros(10, dtype=torch.uint8)
    large = arena.zeros(CHUNK + 1, dtype=torch.uint8)
    assert large.data_ptr() % PAGE == 0
    large[-1] = 1
    small.fill_(2)
    assert large[-1] == 1 and not large[:-1].any()


@pytest.mark.skipif(
    not SMAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(),
    reason="a system without large pages",
)
def test_large_pages_are_asked_for() -> None:
    assert "hg" in flags_at(Arena().zeros(10, dtype=torch.uint8).data_ptr())
    own = Arena(2 * PAGE + 1000).zeros(2 * PAGE + 100, dtype=torch.uint8)
    assert "hg" in flags_at(own.data_ptr()) and "hg" not in flags_at(own.data_ptr() + 2 * PAGE)
    assert "hg" not in flags_at(Arena(PAGE - 1).zeros(10, dtype=torch.uint8).data_ptr())


def test_an_arena_of_a_size_gives_more_where_pieces_need_it() -> None:
    arena = Arena(100)
    pieces = [arena.zeros(100, dtype=torch.uint8).fill_(i) for i in range(3)] + [arena.zeros(PAGE, dtype=torch.uint8)]
    assert [int(piece.sum()) for piece in pieces] == [0, 100, 200, 0]


def test_what_it_takes_beside_its_tensors() -> None:
    arena = Arena()
    assert arena.spare_bytes == 0
    arena.zeros(1000, dtype=torch.float32)
    assert arena.spare_bytes == PAGE - 4000
    arena.zeros(3, PAGE, dtype=torch.uint8)
    assert arena.spare_bytes == PAGE - 4000
    small = Arena(1000)  # all its pages are small
    pieces = [small.zeros(100, dtype=torch.uint8) for _ in range(3)]
    assert pieces[1].data_ptr() - pieces[0].data_ptr() == 128 and small.spare_bytes == mmap.PAGESIZE - 300
    more = Arena(PAGE + 1)
    more.zeros(2 * PAGE, dtype=torch.uint8)
    assert more.spare_bytes == 0
    more.zeros(1, dtype=torch.uint8)  # of a mapping of its own, as its end was reached
    assert more.spare_bytes == PAGE - 1


@pytest.mark.skipif(not SMAPS.exists(), reason="a system without /proc")
def test_the_cache_of_a_cpu_lies_in_large_pages() -> None:
    shape = KvShape(num_kv_heads=2, key_dim=8, value_dim=8)
    cache = KvCache((shape, shape), 4, 16, torch.float32, torch.device("cpu"))
    assert all(not rows.any() for rows in cache.rows)
    eligible = Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert all(("hg" in flags_at(rows.data_ptr())) == eligible for rows in cache.rows)


def test_a_system_without_large_pages_gives_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", -1)
    assert not Arena().zeros(10, dtype=torch.float32).any()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert not Arena().zeros(10, dtype=torch.float32).any()


def test_no_memory_is_said_as_such() -> None:
    with pytest.raises(MemoryError, match="no memory for"):
        Arena().zeros(2**60, dtype=torch.uint8)


def test_a_mapping_lives_as_long_as_a_tensor_in_it() -> None:
    arena = Arena()
    tensor: Tensor | None = arena.zeros(10, dtype=torch.float32)
    chunk = arena._chunk
    assert chunk is not None
    mapping = weakref.ref(chunk)
    del chunk
    arena.zeros(CHUNK + 1, dtype=torch.uint8)
    gc.collect()
    assert mapping() is not None
    del tensor
    gc.collect()
    assert mapping() is None


def test_threads_get_memory_of_their_own() -> None:
    tensors: list[list[Tensor]] = [[] for _ in range(4)]

    def take(own: list[Tensor]) -> None:
        own.extend(huge_pages.zeros(1000, dtype=torch.uint8) for _ in range(500))

    threads = [threading.Thread(target=take, args=(own,)) for own in tensors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    starts = sorted(tensor.data_ptr() for own in tensors for tensor in own)
    assert all(second - first >= 1000 for first, second in itertools.pairwise(starts))
