"""Matrices as torchao quantizes them and transformers stores them, and the numbers that torchao reads from them.

Run this file where torchao is installed to write the vectors beside it again: `python tests/support/torchao_golden.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = Path(__file__).with_suffix(".safetensors")
SIZE = (32, 96)


def golden(case: str) -> dict[str, Tensor]:
    """Of a case: `_weight_qdata` and its companions, `float32`: what the library decodes."""
    prefix = case + "."
    return {name.removeprefix(prefix): t for name, t in load_file(FILE).items() if name.startswith(prefix)}


def _cases() -> dict[str, Any]:
    import torchao.quantization as ao
    from torchao.quantization import MappingType, PerGroup, PerTensor
    from torchao.quantization.quantize_.workflows import Float8Tensor

    def by(config: Any) -> Any:
        def quantized(weight: Tensor) -> Any:
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            linear.weight = torch.nn.Parameter(weight, requires_grad=False)
            ao.quantize_(linear, config)
            return linear.weight

        return quantized

    groups = PerGroup(32)
    return {
        "int8": by(ao.Int8WeightOnlyConfig()),
        "int8-groups": by(ao.Int8WeightOnlyConfig(granularity=groups)),
        "int4": by(ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups)),
        "int4-zeros": by(
            ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=groups, mapping_type=MappingType.ASYMMETRIC)
        ),
        "fp8": by(ao.Float8WeightOnlyConfig()),
        "fp8-tensor": lambda weight: Float8Tensor.from_hp(weight, granularity=PerTensor()),
    }


def _write() -> None:
    made: dict[str, Tensor] = {}
    weight = torch.randn(SIZE, generator=torch.Generator().manual_seed(3))
    for case, quantized in _cases().items():
        tensor = quantized(weight.clone())
        names = [*tensor.tensor_data_names, *getattr(tensor, "optional_tensor_data_names", ())]
        made |= {f"{case}._weight_{name}": getattr(tensor, name) for name in names if hasattr(tensor, name)}
        made[f"{case}.float32"] = tensor.dequantize()
    save_file({name: t.detach().clone().contiguous() for name, t in made.items() if t is not None}, FILE)


if __name__ == "__main__":
    _write()
