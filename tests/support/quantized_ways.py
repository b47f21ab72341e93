"""Ways to store a quantized checkpoint, for `quantized_folder.quantize_folder`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support.bitsandbytes_files import eight_bits, four_bits
from support.quantized_folder import Store, block_fp8, compressed, modelopt_nvfp4, row_fp8, scalar_fp8
from support.torchao_files import torchao_fp8, torchao_whole

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {
    "targets": ["Linear"], "format": "pack-quantized",
    "weights": {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": False},
}  # fmt: skip
INT3 = {**INT4, "weights": {"num_bits": 3, "strategy": "group", "group_size": 32}}
INT8 = {**INT4, "format": "int-quantized", "weights": {"num_bits": 8, "strategy": "channel"}}
FLOAT = {**INT4, "format": "float-quantized", "weights": {**FP8, "strategy": "channel"}}
NAIVE = {**INT4, "format": "naive-quantized", "weights": {**FP8, "strategy": "tensor"}}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True}
NVFP4 = {
    "targets": ["Linear"], "format": "nvfp4-pack-quantized",
    "weights": {**FP4, "strategy": "tensor_group", "group_size": 16},
    "input_activations": {**FP4, "strategy": "tensor_group", "group_size": 16, "dynamic": "local"},
}  # fmt: skip
MX = {"strategy": "group", "group_size": 32, "scale_dtype": "uint8"}
MXFP4 = {"targets": ["Linear"], "format": "mxfp4-pack-quantized", "weights": {**FP4, **MX}}
MXFP8 = {"targets": ["Linear"], "format": "mxfp8-quantized", "weights": {**FP8, **MX}}
MIXED = [
    {**FLOAT, "targets": ["re:.*q_proj$"]},
    {**INT8, "targets": ["re:.*(k_proj|up_proj)$"]},
    {**INT3, "targets": ["re:.*down_proj$"]},
    INT4,
]

WAYS: dict[str, Callable[[], tuple[Store, dict[str, Any]]]] = {
    "fp8 blocks": lambda: block_fp8(32),
    "fbgemm": row_fp8,
    "modelopt": scalar_fp8,
    "int4": lambda: compressed("pack-quantized", INT4),
    "int3": lambda: compressed("pack-quantized", INT3),
    "int8": lambda: compressed("int-quantized", INT8),
    "float": lambda: compressed("float-quantized", FLOAT),
    "naive": lambda: compressed("naive-quantized", NAIVE),
    "nvfp4": lambda: compressed("nvfp4-pack-quantized", NVFP4),
    "mxfp4": lambda: compressed("mxfp4-pack-quantized", MXFP4),
    "mxfp8": lambda: compressed("mxfp8-quantized", MXFP8),
    "modelopt nvfp4": modelopt_nvfp4,
    "nf4": lambda: four_bits(double=True, storage=torch.bfloat16),
    "fp4": lambda: four_bits("fp4", skipped=("k_proj",)),
    "bitsandbytes int8": eight_bits,
    "torchao int8": lambda: torchao_whole(8),
    "torchao int4": lambda: torchao_whole(4, group=32),
    "torchao fp8": torchao_fp8,
    "mixed": lambda: compressed("mixed-precision", *MIXED),
}
