"""Checkpoints of gpt-oss's form whose experts are stored as MXFP4."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.tiny_models import tiny_checkpoint
from torch import Tensor


def random_blocks(num_experts: int, num_rows: int, num_columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_experts, num_rows, num_columns // 32, 16), generator=generator)
    scales = torch.randint(118, 124, (num_experts, num_rows, num_columns // 32), generator=generator)
    return blocks.to(torch.uint8), scales.to(torch.uint8)


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, out, in] float32, as transformers has them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    found: Tensor = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return found.transpose(1, 2)  # theirs is [experts, in, out]


def mxfp4_checkpoint(folder: Path, **sizes: int) -> tuple[Path, Path]:
    """(quantized, plain): random experts, and the same numbers in float32; with a tokenizer."""
    plain = tiny_checkpoint("gpt_oss", folder / "plain", **sizes)
    quantized = folder / "quantized"
    shutil.copytree(plain, quantized)
    tensors = load_file(plain / "model.safetensors")
    kept, exact = {}, {}
    for number, (name, tensor) in enumerate(tensors.items()):
        if not name.endswith(("gate_up_proj", "down_proj")):
            kept[name] = exact[name] = tensor
            continue
        count, num_columns, num_rows = tensor.shape  # [experts, in, out]
        blocks, scales = random_blocks(count, num_rows, num_columns, number)
        kept |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        exact[name] = decoded(blocks, scales).transpose(1, 2).to(tensor.dtype).contiguous()
    save_file(kept, quantized / "model.safetensors", {"format": "pt"})
    save_file(exact, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (quantized / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return quantized, plain
