"""An adapter merged into the modules of a transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from model_server.adapters.folder import read_adapter
from model_server.adapters.merge import Merging, with_tied_rows
from model_server.errors import StartupError
from model_server.models.hf.adapters import is_transposed, module_targets


def merge(model: Any, directory: Path, name: str) -> None:
    """Merge the adapter in `directory` into `model`, in float32, rounded once; errors name it."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    found, modules = module_targets(model)
    embedding, head_name = found.embedding, found.head
    adapter = read_adapter(name, directory, found, ("",))
    if head is not None and head.weight is table.weight:
        adapter = with_tied_rows(adapter, embedding, head_name)
    with torch.inference_mode(), adapter.open() as opened:
        merging = Merging(adapter, opened, embedding, table.weight.dtype)
        for path in {*adapter.pairs, *adapter.rows}:
            module = table if path == embedding else modules[path]
            _merge_into(module, merging, path, name, transposed=is_transposed(module))


def _merge_into(module: Any, merging: Merging, path: str, name: str, *, transposed: bool) -> None:
    stored = module.weight

    def whole() -> Tensor:
        weight: Tensor = stored.detach().float().clone()
        return weight.t() if transposed else weight

    weight = whole()
    merged = merging.matrix(path, weight, [(0, weight.shape[0])], (0, weight.shape[1]), whole)
    merged = merged.t() if transposed else merged
    # Parameters of their own: a tied head must leave the embedding as it is.
    module.weight = nn.Parameter(merged.to(stored.dtype).contiguous(), requires_grad=False)
    if not merging.changes_bias(path):
        return
    if module.bias is None:
        raise StartupError(f"LoRA adapter `{name}`: it adds a bias to {path}, which has none, and cannot be merged")
    bias = merging.bias(path, module.bias.detach().float(), [(0, len(module.bias))])
    module.bias = nn.Parameter(bias.to(module.bias.dtype), requires_grad=False)
