"""Tensors of quantized matrices, of any size and as fast as memory is filled: random bits, few of which repeat.

By format: what a checkpoint's config says of it, and what it stores for a matrix [out, in].
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from model_server.quantization.forms.table import NF4

Tensors = dict[str, Tensor]
_BYTES = torch.randint(0, 256, (2**22,), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def bits(dtype: torch.dtype, *size: int) -> Tensor:
    """Numbers of a whole type: any bits."""
    count = math.prod(size) * dtype.itemsize
    return _BYTES.repeat(-(-count // len(_BYTES)))[:count].clone().view(dtype).view(size)


def small(dtype: str, *size: int) -> Tensor:
    """Floating point numbers, as weights have them."""
    block = torch.randn(2**20, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(getattr(torch, dtype))
    count = math.prod(size)
    return block.repeat(-(-count // block.numel()))[:count].view(size)


def float8(*size: int) -> Tensor:
    """Without infinities and NaN, from 2 ** -7 to 30, and their negatives."""
    return (bits(torch.uint8, *size) & 0xBF).clamp_(max=0xBE).view(torch.float8_e4m3fn)


def constant(number: float, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.full(size, number, dtype=dtype)


def _awq(rows: int, columns: int) -> Tensors:
    return {
        "qweight": bits(torch.int32, columns, rows // 8),
        "qzeros": bits(torch.int32, columns // 128, rows // 8),
        "scales": constant(0.003, columns // 128, rows, dtype=torch.float16),
    }


def _bitsandbytes_4(rows: int, columns: int) -> Tensors:
    """With double quantization."""
    blocks = rows * columns // 64
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns], "nested_blocksize": 256,
        "nested_dtype": "float32", "nested_offset": 0.05,
    }  # fmt: skip
    return {
        "weight": bits(torch.uint8, rows * columns // 2, 1),
        "weight.absmax": bits(torch.uint8, blocks),
        "weight.quant_map": torch.tensor(NF4),
        "weight.nested_absmax": constant(0.01, -(-blocks // 256)),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }  # fmt: skip


def _bitsandbytes_8(rows: int, columns: int) -> Tensors:
    return {
        "weight": bits(torch.int8, rows, columns),
        "SCB": constant(0.1, rows),
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }


def _exl2(rows: int, columns: int) -> Tensors:
    """Half of the inputs with 5 bits, half with 4, in groups of 128."""
    groups = columns // 128
    words = [20 if group < groups // 2 else 16 for group in range(groups)]
    firsts = [sum(words[:group]) for group in range(groups)]
    ends = [number for count, first in zip(words, firsts, strict=True) for number in (count // 4, first)]
    return {
        "q_weight": bits(torch.int32, sum(words), rows),
        "q_scale": bits(torch.int32, groups, rows // 8),
        "q_scale_max": constant(0.01, groups, dtype=torch.float16),
        "q_groups": torch.tensor(ends, dtype=torch.int16),
        "q_invperm": torch.randperm(columns, generator=torch.Generator().manual_seed(0)).int(),
    }


def _fp8(rows: int, columns: int) -> Tensors:
    return {"weight": float8(rows, columns), "weight_scale_inv": constant(0.02, -(-rows // 128), -(-columns // 128))}


def _gptq(rows: int, columns: int) -> Tensors:
    return {
        "qweight": bits(torch.int32, columns // 8, rows),
        "qzeros": constant(0x77777777, columns // 128, rows // 8, dtype=torch.int32),
        "scales": constant(0.003, columns // 128, rows, dtype=torch.float16),
        "g_idx": (torch.arange(columns) // 128).int(),
    }


def _gptq_sorted(rows: int, columns: int) -> Tensors:
    """With an order of activations."""
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(0))
    return _gptq(rows, columns) | {"g_idx": (order // 128).int()}


def _marlin(rows: int, columns: int) -> Tensors:
    return {
        "B": bits(torch.int32, columns // 16, 2 * rows),
        "s": constant(0.003, columns // 128, rows, dtype=torch.float16),
    }


def _nvfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": bits(torch.uint8, rows, columns // 2),
        "weight_scale": float8(rows, columns // 16).float().abs().to(torch.float8_e4m3fn),
        "weight_global_scale": constant(3000.1, 1),
    }


def _mxfp4(rows: int, columns: int) -> Tensors:
    return {
        "weight_packed": bits(torch.uint8, rows, columns // 2),
        "weight_scale": bits(torch.uint8, rows, columns // 32) % 16 + 110,
    }


def _mxfp8(rows: int, columns: int) -> Tensors:
    return {"weight": float8(rows, columns), "weight_scale": bits(torch.uint8, rows, columns // 32) % 16 + 110}


def _packed(rows: int, columns: int) -> Tensors:
    """4 bits with zero points."""
    return {
        "weight_packed": bits(torch.int32, rows, columns // 8),
        "weight_scale": constant(0.003, rows, columns // 128, dtype=torch.bfloat16),
        "weight_zero_point": bits(torch.int32, rows // 8, columns // 128),
        "weight_shape": torch.tensor([rows, columns]),
    }


def _torchao_8(rows: int, columns: int) -> Tensors:
    return {
        "_weight_qdata": bits(torch.int8, rows, columns),
        "_weight_scale": constant(0.0003, rows, 1, dtype=torch.bfloat16),
        "_weight_zero_point": constant(0, rows, 1, dtype=torch.int8),
    }


def _torchao_4(rows: int, columns: int) -> Tensors:
    return {
        "_weight_qdata": (bits(torch.int8, rows, columns) & 15) - 8,
        "_weight_scale": constant(0.003, rows, columns // 32, dtype=torch.bfloat16),
        "_weight_zero_point": constant(0, rows, columns // 32, dtype=torch.int8),
    }


def _torchao_fp8(rows: int, columns: int) -> Tensors:
    return {"_weight_qdata": float8(rows, columns), "_weight_scale": constant(0.0003, rows, 1)}


def _torchao(kind: str) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": kind, "_data": {}}}}


def _compressed(kind: str, number: int, of: str = "float") -> dict[str, Any]:
    weights = {"num_bits": number, "type": of, "strategy": "group", "symmetric": of == "float"}
    groups = {"group_0": {"targets": ["Linear"], "format": kind, "weights": weights}}
    status = {"quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups} | status


_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False}

FORMATS: Mapping[str, tuple[dict[str, Any], Callable[[int, int], Tensors]]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}, _awq),
    "bitsandbytes-nf4": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, _bitsandbytes_4
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _bitsandbytes_8),
    "compressed-tensors int4": (_compressed("pack-quantized", 4, "int"), _packed),
    "exl2": ({"quant_method": "exl2", "bits": 4.5}, _exl2),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, _fp8),
    "gptq": (_GPTQ, _gptq),
    "gptq act-order": (_GPTQ | {"desc_act": True}, _gptq_sorted),
    "marlin": ({"quant_method": "marlin", "bits": 4, "group_size": 128}, _marlin),
    "nvfp4": (_compressed("nvfp4-pack-quantized", 4), _nvfp4),
    "mxfp4": (_compressed("mxfp4-pack-quantized", 4), _mxfp4),
    "mxfp8": (_compressed("mxfp8-quantized", 8), _mxfp8),
    "torchao int8": (_torchao("Int8WeightOnlyConfig"), _torchao_8),
    "torchao int4": (_torchao("IntxWeightOnlyConfig"), _torchao_4),
    "torchao fp8": (_torchao("Float8WeightOnlyConfig"), _torchao_fp8),
}  # fmt: skip

GGUF_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where blocks of GGUF files have the scales and offsets that must be finite; of other types at their beginning."""
