"""Random heads that draft for a tiny model, in the folders that their trainers write."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


class RandomTensors:
    """Tensors of a seed, by the names under which they are stored."""

    def __init__(self, seed: int, scale: float = 0.3) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)
        self._scale = scale

    def add(self, name: str, *shape: int, offset: float = 0.0) -> None:
        self.tensors[name] = torch.randn(shape, generator=self._generator) * self._scale + offset


def write_folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / file)
    return path


def medusa(
    path: Path, *, version: int = 1, number: int = 4, layers: int = 2, hidden: int = 64, vocab: int = 320,
    seed: int = 0, base: str | None = None, heads: list[Tensor] | None = None,
) -> Path:  # fmt: skip
    """heads: matrices over the vocabulary instead of random ones, behind residual layers that add nothing."""
    made = RandomTensors(seed)
    for head in range(number):
        for layer in range(layers if version == 1 else 1):
            made.add(f"{head}.{layer}.linear.weight", hidden, hidden)
            made.add(f"{head}.{layer}.linear.bias", hidden)
        if version == 1:
            made.add(f"{head}.{layers}.weight", vocab, hidden)
    if heads is not None:
        for name, tensor in made.tensors.items():
            tensor.zero_() if ".linear." in name else tensor.copy_(heads[int(name.partition(".")[0])])
    config: dict[str, Any] = {"medusa_num_heads": number, "medusa_num_layers": layers if version == 1 else 1}
    if base is not None:
        config["base_model_name_or_path"] = base
    return write_folder(path, config, made.tensors, "medusa_lm_head.safetensors")


def mlp_speculator(
    path: Path, *, number: int = 3, inner: int = 48, hidden: int = 64, vocab: int = 320, tied: bool = False,
    scales_input: bool = False, seed: int = 0, base: str | None = None,
) -> Path:  # fmt: skip
    made = RandomTensors(seed)
    for place in range(number):
        if not tied or place < 2:
            made.add(f"speculator.proj.{place}.weight", inner, inner if place else hidden)
        if not tied or place < 1:
            made.add(f"speculator.emb.{place}.weight", vocab, inner)
            made.add(f"speculator.ln.{place}.weight", inner, offset=1.0)
            made.add(f"speculator.ln.{place}.bias", inner)
            made.add(f"speculator.head.{place}.weight", vocab, inner)
    config: dict[str, Any] = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "emb_dim": hidden,
        "inner_dim": inner, "n_predict": number, "tie_weights": tied, "scale_input": scales_input, "vocab_size": vocab,
    }  # fmt: skip
    if base is not None:
        config["base_model_name_or_path"] = base
    return write_folder(path, config, made.tensors, "model.safetensors")
