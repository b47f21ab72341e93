"""Value heads of gated delta nets, which GGUF files have in turn by key head, and transformers by key head together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MODULE = "linear_attn."


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """The heads of all layers."""

    key_heads: int
    # Value heads that read one key head.
    repeats: int
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> DeltaHeads:
        """Read checked metadata."""
        name = metadata["general.architecture"]
        keys, heads, key_dim, size = (
            metadata[f"{name}.ssm.{key}"] for key in ("group_count", "time_step_rank", "state_size", "inner_size")
        )
        return cls(keys, heads // keys, key_dim, size // heads)

    def rows(self, tensor: Tensor, name: str) -> Tensor:
        """Return a tensor of the file with rows as transformers has them; columns too, of floating numbers."""
        kind = name.partition(_MODULE)[2]
        before = 2 * self.key_heads * self.key_dim
        if kind in ("in_proj_qkv.weight", "conv1d.weight"):
            return torch.cat((tensor[:before], self._together(tensor[before:], self.value_dim)))
        if kind == "in_proj_z.weight":
            return self._together(tensor, self.value_dim)
        if kind in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias"):
            return self._together(tensor, 1)
        if kind == "out_proj.weight" and tensor.is_floating_point():
            return self._together(tensor.t(), self.value_dim).t()
        return tensor

    def columns(self, name: str) -> ColumnOrder | None:
        """Return the order of a matrix's columns."""
        if not name.endswith(_MODULE + "out_proj.weight"):
            return None
        return ColumnOrder(self._together(torch.arange(self.key_heads * self.repeats), 1), self.value_dim)

    def _together(self, rows: Tensor, size: int) -> Tensor:
        heads = rows.reshape(self.repeats, self.key_heads, size, *rows.shape[1:])
        return heads.transpose(0, 1).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class ColumnOrder:
    """Runs of `size` columns, in transformers' order."""

    runs: Tensor
    size: int

    def apply(self, rows: Tensor, group: int = 1) -> Tensor:
        """Reorder [n, columns // group], of which each number belongs to a group of columns."""
        return rows.view(len(rows), len(self.runs), self.size // group)[:, self.runs].reshape(rows.shape)
