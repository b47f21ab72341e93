"""Modules as bitsandbytes stores them, and the numbers that it reads from them, in a file beside this one.

The library takes 125 MB and is not needed to run the tests. Run this file where it is installed to write the vectors
again: `python tests/support/bitsandbytes_golden.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FILE = Path(__file__).with_suffix(".safetensors")

# Shapes [out, in] whose blocks of 64 are parts of rows, cross rows, and end within a block; and one of more than 256
# blocks, whose scales have several scales.
SHAPES = {"blocks": (8, 128), "crossing": (20, 48), "short": (5, 70)}
LARGE = (130, 128)


def golden(case: str) -> dict[str, Tensor]:
    """Of a case: `source` [out, in] float32, what `weight` and its companions are called in a checkpoint, `float32`
    and `bfloat16`: what the library decodes."""
    prefix = case + "."
    return {name.removeprefix(prefix): t for name, t in load_file(FILE).items() if name.startswith(prefix)}


def _four_bits(source: Tensor, kind: str, *, double: bool, storage: torch.dtype, block: int) -> dict[str, Tensor]:
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Params4bit

    parameter: Any = Params4bit(
        source.clone(),
        requires_grad=False,
        quant_type=kind,
        compress_statistics=double,
        quant_storage=storage,
        blocksize=block,
    ).to("cpu")
    state = parameter.quant_state
    tensors = {f"weight.{name}": t.clone() for name, t in state.as_dict(packed=True).items()}
    decoded = {}
    if source.numel() % block == 0:  # the library's kernel for CPUs takes every row to begin with a block
        state.shape = torch.Size((source.numel() // block, block))
    for dtype in (torch.float32, torch.bfloat16):
        state.dtype = dtype
        decoded[str(dtype).removeprefix("torch.")] = dequantize_4bit(parameter.data, state).view(source.shape)
    return {"weight": parameter.data.clone(), **tensors, **decoded}


def _eight_bits(source: Tensor) -> dict[str, Tensor]:
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    codes, scales, _ = int8_vectorwise_quant(source.half())
    decoded = int8_vectorwise_dequant(codes, scales)
    return {"weight": codes, "SCB": scales, "weight_format": torch.tensor(0, dtype=torch.uint8), "float32": decoded}


def _write() -> None:
    made: dict[str, Tensor] = {}
    for shape, size in SHAPES.items():
        source = torch.randn(size, generator=torch.Generator().manual_seed(len(shape)))
        cases = {
            f"{kind}-{shape}": _four_bits(source, kind, double=False, storage=torch.uint8, block=64)
            for kind in ("nf4", "fp4")
        }
        cases[f"double-{shape}"] = _four_bits(source, "nf4", double=True, storage=torch.uint8, block=64)
        if shape != "short":
            cases[f"bfloat16-{shape}"] = _four_bits(source, "nf4", double=True, storage=torch.bfloat16, block=64)
        if shape == "blocks":
            cases[f"wide-{shape}"] = _four_bits(source, "fp4", double=True, storage=torch.uint8, block=128)
        cases[f"int8-{shape}"] = _eight_bits(source)
        for case, tensors in cases.items():
            made |= {f"{case}.{name}": t.contiguous() for name, t in {"source": source, **tensors}.items()}
    source = torch.randn(LARGE, generator=torch.Generator().manual_seed(0))
    large = _four_bits(source, "nf4", double=True, storage=torch.uint8, block=64)
    made |= {f"double-large.{name}": t.contiguous() for name, t in large.items() if name != "float32"}
    save_file({name: t.clone() for name, t in made.items()}, FILE)


if __name__ == "__main__":
    _write()
