"""sentence-transformers' modules in float32: pooling, Dense, LayerNorm, normalization; text by text."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.cpp import library as cpp
from model_server.errors import StartupError
from model_server.layers.linear.linear import Linear, TorchLinear
from model_server.layers.linear.packed import PackedLinear
from model_server.weights.header import read_headers
from model_server.weights.locate import weight_files
from model_server.weights.reader import SafetensorsReader
from wire.pooling.files import Module

# [n, width] float32 -> the same number of rows.
Stage = Callable[[Tensor], Tensor]

_ACTIVATIONS: Mapping[str, Stage] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": F.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": F.silu,
}


def pool(hidden: Tensor, mode: str) -> Tensor:
    """Pool hidden states [tokens, hidden] to a vector [hidden] in float32."""
    if mode == "cls":
        return hidden[0].float()
    if mode == "lasttoken":
        return hidden[-1].float()
    if mode == "max":
        return hidden.float().amax(dim=0)
    if mode == "weightedmean":
        weights = torch.arange(1, len(hidden) + 1, dtype=torch.float32, device=hidden.device).unsqueeze(1)
        return (hidden.float() * weights).sum(dim=0) / weights.sum()
    total = hidden.sum(dim=0, dtype=torch.float32)
    return total / (math.sqrt(len(hidden)) if mode == "mean_sqrt_len_tokens" else len(hidden))


def vector(hidden: Tensor, modes: Sequence[str], num_prompt: int) -> Tensor:
    """Concatenate several modes.

    Args:
        num_prompt: Tokens at the beginning that do not count, except for the weights of `weightedmean`.
    """
    seen = hidden[num_prompt:] if 0 < num_prompt < len(hidden) else hidden
    parts = [
        _weighted(hidden, num_prompt) if mode == "weightedmean" and len(seen) < len(hidden) else pool(seen, mode)
        for mode in modes
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _weighted(hidden: Tensor, num_prompt: int) -> Tensor:
    weights = torch.arange(1, len(hidden) + 1, dtype=torch.float32, device=hidden.device).unsqueeze(1)[num_prompt:]
    return (hidden[num_prompt:].float() * weights).sum(dim=0) / weights.sum()


def normalized(vectors: Tensor) -> Tensor:
    """Divide rows by their lengths, as sentence-transformers."""
    return torch.stack([F.normalize(row, dim=0) for row in vectors])


def linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """Multiply in float32, independently of the number of rows."""
    if weight.shape[1] % 2 == 0 and cpp.usable(weight.device, weight.dtype):
        return PackedLinear(weight, bias)
    return TorchLinear(weight, bias)


def stages(modules: Sequence[Module], width: int, device: torch.device) -> tuple[list[tuple[str, Stage]], int]:
    """Load the modules behind the pooling by kind, and the last width."""
    made: list[tuple[str, Stage]] = []
    for module in modules:
        if module.kind == "Normalize":
            made.append((module.kind, normalized))
            continue
        stage, width = (_dense if module.kind == "Dense" else _layer_norm)(module, width, device)
        made.append((module.kind, stage))
    return made, width


def _dense(module: Module, width: int, device: torch.device) -> tuple[Stage, int]:
    for name, served in (("module_input_name", "sentence_embedding"), ("use_residual", False)):
        if module.config.get(name, served) not in (served, None):
            raise StartupError(
                f"{module.folder}: a module Dense with `{name}` {module.config[name]!r:.60} is not served"
            )
    tensors = _tensors(module.folder, device)
    weight, bias = tensors.get("linear.weight"), tensors.get("linear.bias")
    if weight is None or weight.dim() != 2 or weight.shape[1] != width:
        shape = None if weight is None else list(weight.shape)
        raise StartupError(f"{module.folder}: linear.weight is {shape}; {width} inputs are needed")
    if bias is None and module.config.get("bias", True) is not False:
        raise StartupError(f"{module.folder}: linear.bias is missing")
    name = str(module.config.get("activation_function", "Tanh")).rpartition(".")[2]
    activation = activation_of(name, module.folder)
    product = linear(weight, bias)
    return (lambda x: activation(product(x))), weight.shape[0]


def activation_of(name: str, place: Path | str) -> Stage:
    """Return the function of torch's class."""
    found = _ACTIVATIONS.get(name)
    if found is None:
        served = ", ".join(_ACTIVATIONS)
        raise StartupError(f"{place}: the activation {name!r:.60} is not served; served: {served}")
    return found


def _layer_norm(module: Module, width: int, device: torch.device) -> tuple[Stage, int]:
    tensors = _tensors(module.folder, device)
    weight, bias = tensors.get("norm.weight"), tensors.get("norm.bias")
    if weight is None or weight.shape != (width,):
        raise StartupError(f"{module.folder}: norm.weight of {width} numbers is missing")
    return (lambda x: F.layer_norm(x, (width,), weight, bias, 1e-5)), width


def _tensors(folder: Path, device: torch.device) -> dict[str, Tensor]:
    """Read float32 tensors; pickled files are refused."""
    headers = read_headers(weight_files(folder))
    names = [name for header in headers.values() for name in header.tensors]
    with SafetensorsReader(headers, dtype=torch.float32, device=device, base_prefix="") as reader:
        return {name: reader.rows(name, [(0, reader.shape(name)[0])]) for name in names}


def splade(config: Mapping[str, Any]) -> Callable[[Tensor], Tensor]:
    """Return what turns logits [tokens, vocab] into a sparse vector [vocab]."""
    strategy, name = config.get("pooling_strategy", "max"), config.get("activation_function", "relu")
    if strategy not in ("max", "sum") or name not in ("relu", "log1p_relu"):
        raise StartupError(f"the module SpladePooling asks for {strategy!r:.40} and {name!r:.40}, which is not served")

    def apply(logits: Tensor) -> Tensor:
        values = torch.log1p(F.relu(logits.float()))
        if name == "log1p_relu":
            values = torch.log1p(values)
        return values.amax(dim=0) if strategy == "max" else values.sum(dim=0)

    return apply
