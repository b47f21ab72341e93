"""Checkpoints as transformers saves them with torchao; `torchao_golden` has what the library itself made."""

from __future__ import annotations

from typing import Any

import torch
from support.quantized_folder import Store, Stored
from torch import Tensor


def torchao_whole(bits: int, group: int | None = None) -> tuple[Store, dict[str, Any]]:
    """Whole numbers with zero points. group: None: a scale for each row."""
    least, most = -(1 << bits - 1), (1 << bits - 1) - 1

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        parts = weight.float().view(len(weight), -1, group or weight.shape[1])
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scale = (high - low) / (most - least)
        zero = (least - low / scale).round().clamp(least, most)
        numbers = ((parts / scale[:, :, None]).round() + zero[:, :, None]).clamp(least, most)
        read = ((numbers - zero[:, :, None]) * scale[:, :, None]).view(weight.shape)
        stored = {
            "_weight_qdata": numbers.view(weight.shape).to(torch.int8),
            "_weight_scale": scale,
            "_weight_zero_point": zero.to(torch.int8),
        }
        return stored, read

    kind = "Int8WeightOnlyConfig" if bits == 8 else "IntxWeightOnlyConfig"
    return store, {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}


def torchao_fp8() -> tuple[Store, dict[str, Any]]:
    """A scale for each row."""

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        scale = weight.float().abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        return {"_weight_qdata": codes, "_weight_scale": scale}, codes.float() * scale

    kind = {"_type": "Float8WeightOnlyConfig", "_data": {}}
    return store, {"quant_method": "torchao", "quant_type": {"default": kind}}
