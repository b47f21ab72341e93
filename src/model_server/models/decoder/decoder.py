"""The one native decoder: blocks of attention and MLP around a residual stream, over a flattened batch.

Built by `models.build` from a Spec and a checkpoint; knows neither names of tensors nor families. Plain objects that
hold tensors instead of `nn.Module`: on a CPU at batch 1 the interpreter's share of a step is what there is to save.
"""

from __future__ import annotations

from torch import Tensor

from model_server.attention.backend import AttentionBackend
from model_server.layers.embedding import Head, Stem
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import AddNorm
from model_server.layers.rotary import Rotary
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.decoder.blocks import Block, residual_norm
from model_server.models.decoder.cpp_stack import CppStack
from model_server.models.decoder.parts import Step
from model_server.runner.runner import ModelInputs, RunnerTraits


class Decoder:
    """A loaded model on this rank, a `runner.Runner`. The caller enters `torch.inference_mode`.

    norm, projection: between the last block and the head, where the family has them. stack: all blocks in one, which is
    preferred to them in the steps that it takes.
    """

    def __init__(
        self,
        *,
        stem: Stem,
        blocks: list[Block],
        norm: AddNorm | None,
        projection: Linear | None,
        head: Head,
        rotaries: tuple[Rotary, ...],
        attention: AttentionBackend,
        vocab_size: int,
        max_positions: int | None,
        weight_bytes: int,
        stack: CppStack | None = None,
    ) -> None:
        self._stem = stem
        self._blocks = blocks
        self._norm = norm
        self._projection = projection
        self._head = head
        self._rotaries = rotaries
        self._attention = attention
        self._kv_shapes = tuple(block.attention.kv_shape for block in blocks)
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._stack = stack
        parts = [part for block in blocks for part in (block.attention, block.mlp)]
        self.traits = RunnerTraits(
            attention=attention,
            # Parts that ask the device say so themselves.
            capturable=attention.capturable and all(getattr(part, "capturable", True) for part in parts),
            position_rows=stem.position_rows,
            weight_bytes=weight_bytes,
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_positions(self) -> int | None:
        return self._max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return self._kv_shapes

    def reserve_positions(self, max_positions: int) -> None:
        """For the longest sequence that will ever be decoded."""
        for rotary in self._rotaries:
            rotary.reserve(max_positions)

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Tokens whose logits nobody wants leave after the last layer's attention."""
        metadata = inputs.attention
        positions = inputs.positions
        step = Step(
            positions=positions,
            rotations=tuple(r.rotations(positions, metadata.max_kv_length) for r in self._rotaries),
            slots=metadata.slots,
            cache=cache,
            attention=self._attention.begin(metadata, cache),
        )
        hidden, added = self._stem(inputs.input_ids, positions), None
        if self._stack is not None and self._stack.takes(step, hidden):
            hidden = self._stack(hidden, step, inputs.logit_rows)
        else:
            for block in self._blocks[:-1]:
                hidden, added = block(hidden, added, step)
            hidden, added = self._blocks[-1](hidden, added, step, inputs.logit_rows)
        _, hidden = residual_norm(self._norm, hidden, added)
        if self._projection is not None:
            hidden = self._projection(hidden)
        return self._head(hidden)
