"""LoRA adapter folders as PEFT writes them, with random matrices."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_adapter(
    directory: Path,
    targets: Mapping[str, tuple[int, int]],
    *,
    rank: int = 4,
    seed: int = 0,
    tensors: Mapping[str, Tensor] | None = None,
    **fields: Any,
) -> Path:
    """targets: (inputs, outputs) of each module that it changes. tensors: instead of, or beside, the random ones.
    fields: of the config."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for module, (inputs, outputs) in targets.items():
        weights[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / 8
        weights[f"base_model.model.{module}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 8
    save_file(weights | dict(tensors or {}), directory / "adapter_model.safetensors")
    return directory
