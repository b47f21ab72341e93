"""An adapter merged into the modules of a transformers model. Imports transformers late."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from model_server.adapters.folder import read_adapter
from model_server.adapters.merge import product


def merge(model: Any, directory: Path, name: str) -> None:
    """Add the products of the adapter in `directory` to the weights of `model`, in float32, rounded once.

    Raises StartupError, which names the adapter, for a folder that is not served, or a module that takes no adapter.
    """
    from transformers.pytorch_utils import Conv1D

    modules = {path: one for path, one in model.named_modules() if isinstance(one, nn.Linear | Conv1D)}
    targets: dict[str, tuple[int, int]] = {}
    for path, one in modules.items():
        rows, columns = one.weight.shape
        targets[path] = (rows, columns) if isinstance(one, Conv1D) else (columns, rows)
    head = next((path for path, one in modules.items() if one is model.get_output_embeddings()), "")
    adapter = read_adapter(name, directory, targets, head, ("",))
    with torch.inference_mode(), adapter.open() as opened:
        for path, pair in adapter.pairs.items():
            module, (inputs, outputs) = modules[path], targets[path]
            delta = product(adapter, opened, pair, [(0, outputs)], [(0, inputs)], module.weight.device)
            delta = delta.t() if isinstance(module, Conv1D) else delta
            # A parameter of its own: a tied head must leave the embedding as it is.
            merged = (module.weight.float() + delta).to(module.weight.dtype)
            module.weight = nn.Parameter(merged, requires_grad=False)
