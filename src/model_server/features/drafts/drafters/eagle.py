"""EAGLE-3: a decoder layer on inputs of some of the model's layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend
from model_server.distributed.group import ProcessGroup
from model_server.features.drafts.drafters.layer_drafter import begin_step
from model_server.layers.embedding import Head
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import AddNorm
from model_server.layers.rotary import Rotary
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.decoder.attention.multi_head import Attention
from model_server.models.decoder.mlp import DenseMlp
from model_server.runner.runner import Kept, ModelInputs


@dataclass(frozen=True, slots=True)
class EagleLayer:
    """The layer and what is around it."""

    embed: Callable[[Tensor], Tensor]
    # Of the states together, or of each; empty: none.
    fc_norms: tuple[AddNorm, ...]
    fc: Linear
    input_norm: AddNorm
    hidden_norm: AddNorm
    attention: Attention
    post_norm: AddNorm
    mlp: DenseMlp
    norm: AddNorm
    head: Head
    # [draft vocabulary] int64: the model's ids; None: the same.
    ids: Tensor | None
    # The residual begins behind the states' norm.
    norms_residual: bool
    # The next place reads the normed output.
    norms_output: bool
    rotaries: tuple[Rotary, ...]
    backend: AttentionBackend
    group: ProcessGroup
    hidden_size: int
    max_positions: int | None

    @property
    def kv_shape(self) -> KvShape:
        return self.attention.kv_shape

    def retains(self) -> Kept:
        return Kept()

    def kept(self, kept: Kept) -> Tensor:
        return torch.cat(kept.inputs, dim=-1)

    def states(self, kept: Tensor) -> Tensor:
        """Turn several layers' states side by side into [n, hidden]."""
        parts = kept.chunk(len(self.fc_norms), dim=-1) if self.fc_norms else ()
        normed = [norm(part.contiguous()) for norm, part in zip(self.fc_norms, parts, strict=True)]
        return self.fc(torch.cat(normed, dim=-1) if normed else kept)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """[n, hidden], before the last norm."""
        embedded = self.embed(inputs.input_ids)
        hidden = torch.zeros_like(embedded) if inputs.hidden is None else inputs.hidden
        step = begin_step(inputs, self.rotaries, self.backend, cache)
        normed = self.hidden_norm(hidden)
        values = self.attention(torch.cat((self.input_norm(embedded), normed), dim=-1), step)
        residual = normed if self.norms_residual else hidden
        residual = residual + self.group.all_reduce(self.attention.output(values))
        return residual + self.group.all_reduce(self.mlp(self.post_norm(residual), step))

    def likeliest(self, hidden: Tensor) -> Tensor:
        found = self.head.likeliest(self.norm(hidden))
        return found if self.ids is None else self.ids.index_select(0, found)

    def next_states(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.norms_output else hidden
