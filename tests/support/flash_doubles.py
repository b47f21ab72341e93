"""The functions of flash-attn 2, 3 and 4 and torch's varlen attention, written out in plain torch.

Each takes the arguments that the library documents, with its names and defaults, checks what the library's C++ checks
(types, shapes, strides, page sizes), and follows its documented semantics: the causal mask is aligned to the bottom
right corner, a window is (left, right) around the aligned position, -1 for unbounded; scores are scaled, capped, then
biased by -slope * |distance|. So a backend that prepares its arguments wrongly fails here, without a card.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def pages_of(pool: Tensor, row: Tensor, length: int) -> Tensor:
    """[length, heads, dim] of one sequence, gathered page by page."""
    size = pool.shape[1]
    return torch.cat([pool[int(page)] for page in row[: -(-length // size)]])[:length]


def attend_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    window: tuple[int, int],
    softcap: float,
    slopes: Any,
    sinks: Any = None,
) -> Tensor:
    """One sequence: query [m, heads, dim], key and value [n, kv_heads, dim] -> [m, heads, dim]; rounded once."""
    groups = query.shape[1] // key.shape[1]
    key, value = (t.double().repeat_interleave(groups, dim=1) for t in (key, value))
    scores = torch.einsum("mhd,nhd->hmn", query.double(), key) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(query))[:, None] + len(key) - len(query)
    distance = torch.arange(len(key))[None, :] - at
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    left, right = window
    hidden = torch.zeros(distance.shape, dtype=torch.bool)
    if left >= 0:
        hidden |= distance < -left
    if right >= 0:
        hidden |= distance > right
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((sinks.double()[:, None, None].expand(-1, len(query), 1), scores), dim=-1)
    weights = scores.softmax(-1)[..., -len(key) :]
    return torch.einsum("hmn,nhd->mhd", weights, value).to(query.dtype)


def check_paged(
    query: Tensor, key: Tensor, value: Tensor, table: Tensor, page_multiple: int, *, own_value_width: bool = False
) -> None:
    """own_value_width: values may be narrower than keys."""
    assert query.dtype in (torch.float16, torch.bfloat16)
    assert key.dtype == value.dtype == query.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert key.dim() == 4
    assert key.shape == value.shape or (own_value_width and key.shape[:3] == value.shape[:3])
    assert key.shape[1] % page_multiple == 0, "Paged KV cache block size must be divisible by 256"
    assert key.shape[3] == query.shape[-1] <= 256
    assert key.shape[3] % 8 == 0
    assert query.shape[-2] % key.shape[2] == 0
    assert table.dtype == torch.int32
    assert table.stride(-1) == 1


def check_lengths(lengths: Tensor, count: int) -> None:
    assert lengths.dtype == torch.int32
    assert lengths.is_contiguous()
    assert lengths.shape == (count,)


def ragged(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, lengths: Tensor, table: Tensor, *options: Any
) -> Tensor:
    """Sequences in a row: query [total, heads, dim], starts [n + 1]."""
    check_lengths(starts, len(table) + 1)
    check_lengths(lengths, len(table))
    rows = []
    for i, length in enumerate(lengths.tolist()):
        own = query[int(starts[i]) : int(starts[i + 1])]
        rows.append(attend_one(own, pages_of(key, table[i], length), pages_of(value, table[i], length), *options))
    return torch.cat(rows)


def window_2(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """A causal mask ends a window at the query itself."""
    return (window[0], 0) if causal else window


def varlen_func_2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """flash_attn 2.7 and 2.8."""
    assert block_table is not None
    assert softmax_scale is not None
    check_paged(q, k, v, block_table, 256)
    check_lengths(cu_seqlens_k, len(block_table) + 1)
    lengths = cu_seqlens_k.diff()
    assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    assert max_seqlen_k == int(lengths.max())
    return ragged(
        q, k, v, cu_seqlens_q, lengths, block_table, softmax_scale, window_2(causal, window_size), softcap, alibi_slopes
    )


def with_kvcache_2(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """flash_attn 2.7 and 2.8: q [batch, queries, heads, dim]; nothing is appended."""
    assert block_table is not None
    assert cache_seqlens is not None
    assert softmax_scale is not None
    check_paged(q, k_cache, v_cache, block_table, 256)
    count = q.shape[1]
    starts = torch.arange(0, (len(q) + 1) * count, count, dtype=torch.int32)
    options = softmax_scale, window_2(causal, window_size), softcap, alibi_slopes
    return ragged(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, *options).view(q.shape)


def with_kvcache_3(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    page_table: Tensor,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    num_splits: int = 0,
) -> Tensor:
    """flash_attn_interface: q [batch, queries, heads, dim], or [total, heads, dim] with cu_seqlens_q."""
    assert softmax_scale is not None
    check_paged(q, k_cache, v_cache, page_table, 1)
    if cu_seqlens_q is None:
        assert q.dim() == 4
        count = q.shape[1]
        cu_seqlens_q = torch.arange(0, (len(q) + 1) * count, count, dtype=torch.int32)
    else:
        assert q.dim() == 3
        assert max_seqlen_q == int(cu_seqlens_q.diff().max())
    options = softmax_scale, window_2(causal, window_size), softcap, None
    flat = q.reshape(-1, *q.shape[-2:])
    return ragged(flat, k_cache, v_cache, cu_seqlens_q, cache_seqlens, page_table, *options).view(q.shape)


def varlen_func_4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_k: Tensor,
    page_table: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, None]:
    """flash_attn.cute 4.0.0b36: what it needs of its arguments with a page table, among its many."""
    assert softmax_scale is not None and causal
    check_paged(q, k, v, page_table, 1, own_value_width=True)
    assert len(cu_seqlens_q) == len(page_table) + 1 and int(cu_seqlens_q[0]) == 0
    assert max_seqlen_q == int(cu_seqlens_q.diff().max()) and max_seqlen_k == int(seqused_k.max())
    assert learnable_sink is None or learnable_sink.shape == (q.shape[1],)
    left, right = window_size
    window = (-1 if left is None else left, 0)
    assert right in (None, 0)
    options = softmax_scale, window, softcap, None, learnable_sink
    return ragged(q, k, v, cu_seqlens_q, seqused_k, page_table, *options), None


def torch_varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: object = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """torch 2.12 and 2.13, over flash-attention 2."""
    assert block_table is not None
    assert seqused_k is not None
    assert scale is not None
    assert cu_seq_k is not None, "flash-attention 2 wants it"
    check_lengths(cu_seq_k, len(block_table) + 1)
    check_paged(query, key, value, block_table, 256)
    assert enable_gqa or query.shape[1] == key.shape[2]
    assert max_q == int(cu_seq_q.diff().max())
    assert max_k >= int(seqused_k.max())
    return ragged(query, key, value, cu_seq_q, seqused_k, block_table, scale, window_size, 0.0, None)


FLASH_ATTN_2 = SimpleNamespace(flash_attn_varlen_func=varlen_func_2, flash_attn_with_kvcache=with_kvcache_2)
FLASH_ATTN_3 = SimpleNamespace(flash_attn_with_kvcache=with_kvcache_3)
