"""How several ranks divide an encoder-decoder: transformers has plans for none, and names its layers in a few ways."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from model_server.errors import StartupError

# Matrices whose outputs are divided, and those that read what these made: a layer's sum is that of all ranks.
_BY_OUTPUTS = ("q", "k", "v", "q_proj", "k_proj", "v_proj", "wi", "wi_0", "wi_1", "fc1", "gate_proj", "up_proj")
_BY_INPUTS = ("o", "out_proj", "o_proj", "wo", "fc2", "down_proj")


def plan_of(model_class: Any, config: Any, world_size: int) -> dict[str, str]:
    """Return transformers' rule for each matrix of the layers, by names with `*` for numbers; empty: it has others.

    Raises:
        StartupError: The ranks cannot divide a matrix evenly.
    """
    plan: dict[str, str] = {}
    with torch.device("meta"):
        model = model_class._from_config(config)
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not re.search(r"\.\d+\.", name):
            continue
        leaf = name.rpartition(".")[2]
        if leaf not in (*_BY_OUTPUTS, *_BY_INPUTS):
            return {}
        divided = module.out_features if leaf in _BY_OUTPUTS else module.in_features
        if divided % world_size:
            raise StartupError(
                f"{config.model_type}: {divided} numbers of {name} cannot be divided among {world_size} shards; use "
                "--num-shard 1"
            )
        plan[re.sub(r"\.\d+\.", ".*.", name)] = "colwise" if leaf in _BY_OUTPUTS else "rowwise"
    return plan


def count_own_heads(model: Any, world_size: int) -> None:
    """Tell T5's attention how many heads this rank has: it does not ask its matrices."""
    for module in model.modules():
        if hasattr(module, "n_heads") and hasattr(module, "key_value_proj_dim"):
            module.n_heads //= world_size
