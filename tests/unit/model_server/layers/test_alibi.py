"""Slopes against transformers' own functions."""

from __future__ import annotations

import pytest
import torch

from model_server.layers.alibi import bloom_slopes, mpt_slopes

HEADS = [1, 2, 4, 6, 8, 12, 32, 40, 71, 112]


@pytest.mark.parametrize("num_heads", HEADS)
def test_bloom(num_heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    wanted = build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(bloom_slopes(num_heads)), wanted)


@pytest.mark.parametrize("num_heads", HEADS)
@pytest.mark.parametrize("bias_max", [8, 16])
def test_mpt(num_heads: int, bias_max: int) -> None:
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    wanted = -build_mpt_alibi_tensor(num_heads, 2, bias_max)[:, 0, 0]
    torch.testing.assert_close(torch.tensor(mpt_slopes(num_heads, bias_max)), wanted)
