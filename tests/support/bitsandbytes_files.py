"""Checkpoints as transformers saves them with bitsandbytes; `bitsandbytes_golden` has what the library itself wrote."""

from __future__ import annotations

import json
from typing import Any

import torch
from support.quantized_folder import Store, Stored
from torch import Tensor

from model_server.quantization.forms.table import FP4, NF4


def four_bits(
    kind: str = "nf4", *, double: bool = False, storage: torch.dtype = torch.uint8, skipped: tuple[str, ...] = ()
) -> tuple[Store, dict[str, Any]]:
    """skipped: parts of the names of modules that stay plain."""
    table = torch.tensor(NF4 if kind == "nf4" else FP4)

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor] | None:
        if any(name in module for name in skipped):
            return None
        numbers = weight.float().flatten()
        blocks = torch.nn.functional.pad(numbers, (0, -len(numbers) % 64)).view(-1, 64)
        scales = blocks.abs().amax(1)
        codes = (blocks[:, :, None] / scales[:, None, None] - table).abs().argmin(2)[:, :].flatten()[: len(numbers)]
        state: dict[str, Any] = {"quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        nested: Stored = {}
        read, absmax = scales, scales
        if double:
            offset, numbers_of_bytes = scales.mean(), torch.linspace(-1, 1, 256)
            large = torch.stack([part.abs().max() for part in (scales - offset).split(256)])
            spread = large.repeat_interleave(256)[: len(scales)]
            absmax = ((scales - offset)[:, None] / spread[:, None] - numbers_of_bytes).abs().argmin(1).to(torch.uint8)
            read = numbers_of_bytes[absmax.long()] * spread + offset
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
            nested = {"weight.nested_absmax": large, "weight.nested_quant_map": numbers_of_bytes.clone()}
        pairs = codes.to(torch.uint8).view(-1, 2)
        stored = {
            "weight": (pairs[:, 0] << 4 | pairs[:, 1]).view(storage).unsqueeze(1),
            "weight.absmax": absmax,
            "weight.quant_map": table.clone(),
            f"weight.quant_state.bitsandbytes__{kind}": torch.frombuffer(
                bytearray(json.dumps(state).encode()), dtype=torch.uint8
            ),
        }
        return stored | nested, (table[codes] * read.repeat_interleave(64)[: len(numbers)]).view(weight.shape)

    return store, {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": kind,
        "bnb_4bit_use_double_quant": double, "bnb_4bit_quant_storage": str(storage).removeprefix("torch."),
        "llm_int8_skip_modules": list(skipped) or None,
    }  # fmt: skip


def eight_bits() -> tuple[Store, dict[str, Any]]:
    """A scale for each row."""

    def store(module: str, weight: Tensor) -> tuple[Stored, Tensor]:
        largest = weight.float().abs().amax(1)
        codes = (weight.float() * (127 / largest[:, None])).round().to(torch.int8)
        stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, codes.float() * (largest[:, None] / 127)

    return store, {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}
