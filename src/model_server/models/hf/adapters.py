"""LoRA adapters of a transformers model, as hooks on linear layers, embedding and head.

Hooks know rows by their place alone, which not all modelling code keeps: `self_check.check_adapted` tries it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from model_server.adapters.folder import read_adapter
from model_server.models.adapters.linear import AdaptedEmbedding, AdaptedLinear
from model_server.models.adapters.sites import AdapterSites
from model_server.weights.matrix import Part
from model_server.weights.products import HeadTable, Product, Products, Table


def module_targets(model: Any) -> tuple[Products, dict[str, Any]]:
    """Return what takes adapters, and the linear modules by path."""
    from transformers.pytorch_utils import Conv1D

    paths = {one: path for path, one in model.named_modules()}
    modules = {path: one for one, path in paths.items() if isinstance(one, nn.Linear | Conv1D)}
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    linear: dict[str, tuple[int, int]] = {}
    for path, one in modules.items():
        rows, columns = one.weight.shape
        linear[path] = (rows, columns) if isinstance(one, Conv1D) else (columns, rows)
    size, width = table.weight.shape
    found = Products(linear=linear, head=paths.get(head, ""), embedding=paths.get(table, ""), table=(size, width))
    return found, modules


def is_transposed(module: Any) -> bool:
    """Whether its weight is [in, out]."""
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


class HookedAdapters:
    """The adapters of one model; `called`: modules that asked so far."""

    def __init__(self, model: Any, folders: Mapping[str, Path], dtype: torch.dtype, device: torch.device) -> None:
        """Load the adapters; errors name one."""
        targets, modules = module_targets(model)
        table = model.get_input_embeddings()
        # Some embeddings multiply what they give, and some layers have another type than the model.
        plain = type(table) is nn.Embedding and table.weight.dtype == dtype
        modules = {path: one for path, one in modules.items() if one.weight.dtype == dtype}
        targets = Products(
            linear={path: targets.linear[path] for path in modules},
            head=targets.head if targets.head in modules else "",
            embedding=targets.embedding if plain else "",
            table=targets.table,
        )
        adapters = tuple(read_adapter(name, folder, targets, ("",)) for name, folder in folders.items())
        self.sites = AdapterSites(targets, adapters, dtype, device)
        self.called: set[str] = set()
        self.hooked: set[str] = set()
        for path, module in modules.items():
            tied = targets.embedding if path == targets.head and module.weight is table.weight else None
            of_head = _head(path, module, tied) if path == targets.head else None
            linear = self.sites.linear(cast(Any, module), _product(path, module), of_head)
            if isinstance(linear, AdaptedLinear):
                self._hook(path, module, partial(_adapt_rows, linear))
        if targets.embedding:
            embedding = self.sites.embedding(cast(Any, table), _table(targets.embedding, table))
            if isinstance(embedding, AdaptedEmbedding):
                self._hook(targets.embedding, table, partial(_adapt_embedded, embedding))
        self.num_bytes = self.sites.load_given()

    def _hook(self, path: str, module: Any, change: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.hooked.add(path)

        def hook(module: Any, args: tuple[Any, ...], output: Tensor) -> Tensor:
            self.called.add(path)
            return change(args[0], output)

        module.register_forward_hook(hook)


def _adapt_rows(linear: AdaptedLinear, x: Tensor, output: Tensor) -> Tensor:
    changed = linear.adapt(x.reshape(-1, x.shape[-1]), output.reshape(-1, output.shape[-1]))
    return changed.view(output.shape)


def _adapt_embedded(embedding: AdaptedEmbedding, ids: Tensor, output: Tensor) -> Tensor:
    """ids [1, n], output [1, n, width]."""
    return embedding.adapt(ids.flatten(), output.reshape(-1, output.shape[-1])).view(output.shape)


def _product(path: str, module: Any) -> Product:
    stored: Tensor = module.weight
    transposed = is_transposed(module)
    num_rows = stored.shape[1 if transposed else 0]

    def weight() -> Tensor:
        whole = stored.detach().float()
        return whole.t() if transposed else whole

    part = Part(path, ((0, num_rows),), num_rows)
    return Product(parts=(part,), columns=None, weight=weight, bias=module.bias)


def _table(path: str, module: Any) -> Table:
    weight: Tensor = module.weight.detach()
    return Table(module=path, size=len(weight), rows=lambda wanted: weight[slice(*wanted)])


def _head(path: str, module: Any, tied_to: str | None) -> HeadTable:
    table = _table(path, module)
    return HeadTable(table=table, rows=(0, table.size), bias=module.bias, tied_to=tied_to)
