"""The one native decoder: blocks of attention and MLP around a residual stream, over a flattened batch.

Built by `models.build` from a Spec and a checkpoint; knows neither names of tensors nor families. Plain objects that
hold tensors instead of `nn.Module`: on a CPU at batch 1 the interpreter's share of a step is what there is to save.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer, AttentionStep
from model_server.kv_cache import KvCache, KvShape
from model_server.layers.embedding import Embedding, Head
from model_server.layers.linear import Linear, RowParallelLinear
from model_server.layers.norm import RmsNorm
from model_server.layers.rotary import Rotary, rotate_
from model_server.runner import ModelInputs


@dataclass(frozen=True, slots=True)
class Step:
    """What all layers of one forward share."""

    rotations: Tensor  # [num_tokens, 1, head_dim / 2] complex64
    slots: Tensor  # [num_tokens] int64
    cache: KvCache
    attention: AttentionStep


@dataclass(frozen=True, slots=True)
class Attention:
    """Rotary grouped-query attention of this rank's heads."""

    qkv: Linear  # rows: all query heads, all key heads, all value heads
    output: RowParallelLinear
    qk_norm: RmsNorm | None  # weight [num_heads + num_kv_heads, head_dim]
    layer: AttentionLayer

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """[num_tokens, hidden] -> attention values [num_tokens, num_heads * head_dim], before the output product."""
        layer = self.layer
        num_tokens = hidden.shape[0]
        num_rotated = layer.num_heads + layer.num_kv_heads
        query_width = layer.num_heads * layer.head_dim
        rotated_width = num_rotated * layer.head_dim
        qkv = self.qkv(hidden)
        heads = qkv[:, :rotated_width].view(num_tokens, num_rotated, layer.head_dim)
        if self.qk_norm is not None:
            heads.copy_(self.qk_norm(heads))
        rotate_(heads, step.rotations)
        step.cache.write_rows(layer.index, step.slots, qkv[:, query_width:])
        value = qkv[:, rotated_width:].view(num_tokens, layer.num_kv_heads, layer.head_dim)
        return step.attention.attend(layer, heads[:, : layer.num_heads], heads[:, layer.num_heads :], value)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)) of this rank's part of the intermediate dimension."""

    gate_up: Linear  # rows: gate, then up
    activation: Callable[[Tensor], Tensor]
    down: RowParallelLinear

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.down(self.activation(self.gate_up(hidden)))


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: x += attention(norm(x)); x += mlp(norm(x))."""

    attention_norm: RmsNorm
    attention: Attention
    mlp_norm: RmsNorm
    mlp: GatedMlp

    def __call__(self, hidden: Tensor, step: Step, kept_rows: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden] -> the same; with `kept_rows` [num_rows] int64 only those tokens go on."""
        attended = self.attention(self.attention_norm(hidden), step)
        if kept_rows is not None:
            attended, hidden = attended.index_select(0, kept_rows), hidden.index_select(0, kept_rows)
        hidden = self.attention.output(attended).add_(hidden)
        return self.mlp(self.mlp_norm(hidden)).add_(hidden)


class Decoder:
    """A loaded model on this rank, a `runner.Runner`. The caller enters `torch.inference_mode`."""

    def __init__(
        self,
        *,
        embedding: Embedding,
        blocks: list[Block],
        norm: RmsNorm,
        head: Head,
        rotary: Rotary,
        attention: AttentionBackend,
        kv_shapes: tuple[KvShape, ...],
        vocab_size: int,
        max_positions: int,
        weight_bytes: int,
    ) -> None:
        self._embedding = embedding
        self._blocks = blocks
        self._norm = norm
        self._head = head
        self._rotary = rotary
        self._attention = attention
        self._kv_shapes = kv_shapes
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._weight_bytes = weight_bytes

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return self._kv_shapes

    @property
    def weight_bytes(self) -> int:
        return self._weight_bytes

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """See `Runner.forward`. Tokens whose logits nobody wants leave after the last layer's attention."""
        metadata = inputs.attention
        step = Step(
            rotations=self._rotary.rotations(inputs.positions, metadata.max_kv_length),
            slots=metadata.slots,
            cache=cache,
            attention=self._attention.begin(metadata, cache),
        )
        hidden = self._embedding(inputs.input_ids)
        for block in self._blocks[:-1]:
            hidden = block(hidden, step)
        hidden = self._blocks[-1](hidden, step, inputs.logit_rows)
        return self._head(self._norm(hidden))
