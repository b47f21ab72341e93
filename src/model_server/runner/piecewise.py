"""Steps with prompts in captured pieces: graphs between calls of attention, which runs as it is.

All except attention depends on the number of tokens alone, padded to the next captured one (token 0 at position 0,
block 0).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.adapters.rows import AdapterBuffers, AdapterRows
from model_server.attention.backend import AttentionLayer, AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.runner.graph_capture import CapturedGraph
from model_server.runner.runner import ModelInputs

# Numbers of tokens to capture, the largest first. Larger steps take longer than the host needs to enqueue them.
TOKEN_SIZES = (512, 256, 128, 64)


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of attention at fixed addresses: inputs, and where its result is read."""

    layer: AttentionLayer
    query: Tensor
    key: Tensor
    value: Tensor
    result: Tensor


class PiecewiseBuffers:
    """Fixed addresses of steps up to `max_tokens`; calls of one shape share memory."""

    def __init__(
        self, max_tokens: int, max_rows: int, max_length: int, device: torch.device, num_slots: int = 0
    ) -> None:
        self.max_rows = max_rows
        self.max_length = max_length
        self._max_tokens = max_tokens
        self._ids, self._positions, self._slots = (
            torch.zeros(max_tokens, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._logit_rows = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._no_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self._bounds = torch.zeros(2, dtype=torch.int32, device=device)
        self._adapters = AdapterBuffers(max_tokens, num_slots, device)
        self._kept_adapters = AdapterBuffers(max_rows, num_slots, device)
        self._filled_tokens = 0
        self._calls: dict[tuple[str, tuple[int, ...], torch.dtype], Tensor] = {}

    def rows(self, num_tokens: int) -> int:
        """Return rows of logits: fewer than tokens, so that products can tell their rows apart."""
        return min(num_tokens - 1, self.max_rows)

    def inputs(self, num_tokens: int, attention: AttentionStep, *, adapted: bool = False) -> ModelInputs:
        """Return what a padded step reads; `attention` answers its calls."""
        metadata = AttentionMetadata(
            slots=self._slots[:num_tokens],
            block_tables=self._no_table,
            cu_seqlens_q=self._bounds,
            kv_lengths=self._bounds[1:],
            query_lengths_host=(num_tokens,),
            kv_lengths_host=(self.max_length,),
        )
        rows = self._logit_rows[: self.rows(num_tokens)]
        adapters = AdapterRows(self._adapters.of(num_tokens), self._kept_adapters.of(len(rows))) if adapted else None
        return ModelInputs(
            self._ids[:num_tokens],
            self._positions[:num_tokens],
            metadata,
            rows,
            attention_step=attention,
            adapters=adapters,
        )

    def fill(self, inputs: ModelInputs, num_tokens: int) -> None:
        """Copy a step, and pad up to `num_tokens` and over the last step's tokens."""
        assert inputs.logit_rows is not None
        tokens, rows = inputs.input_ids.shape[0], inputs.logit_rows.shape[0]
        if tokens < self._filled_tokens:
            gone = slice(tokens, self._filled_tokens)
            torch._foreach_zero_([self._ids[gone], self._positions[gone], self._slots[gone]])
        self._filled_tokens = tokens
        torch._foreach_copy_(
            [self._ids[:tokens], self._positions[:tokens], self._slots[:tokens], self._logit_rows[:rows]],
            [inputs.input_ids, inputs.positions, inputs.attention.slots, inputs.logit_rows],
        )
        if inputs.adapters is not None:
            self._adapters.fill(inputs.adapters.all, num_tokens)
            self._kept_adapters.fill(inputs.adapters.kept, self.rows(num_tokens))
        # Rows beyond are computed too, of tokens that this size has.
        self._logit_rows[rows:].zero_()

    def call(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> _Call:
        """Return the call for such tensors."""
        tokens = query.shape[0]
        return _Call(
            layer,
            self._place("query", tokens, query.shape[1:], query.dtype, query.device),
            self._place("key", tokens, key.shape[1:], key.dtype, key.device),
            self._place("value", tokens, value.shape[1:], value.dtype, value.device),
            self._place("result", tokens, (layer.num_heads * layer.value_dim,), query.dtype, query.device),
        )

    def _place(
        self, role: str, tokens: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        key = (role, tuple(shape), dtype)
        if key not in self._calls:
            self._calls[key] = torch.zeros(self._max_tokens, *shape, dtype=dtype, device=device)
        return self._calls[key][:tokens]


class Recorder:
    """An `AttentionStep` whose calls end a captured piece."""

    def __init__(self, buffers: PiecewiseBuffers) -> None:
        self.calls: list[_Call] = []
        self._buffers = buffers
        self._cut: Callable[[], None] = lambda: None

    def start(self, cut: Callable[[], None]) -> Recorder:
        """Forget the calls; `cut` separates pieces."""
        self.calls, self._cut = [], cut
        return self

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        call = self._buffers.call(layer, query, key, value)
        torch._foreach_copy_([call.query, call.key, call.value], [query, key, value])
        self.calls.append(call)
        self._cut()
        return call.result


@dataclass(frozen=True, slots=True)
class PiecewiseGraph:
    """Pieces of one size, with calls in between."""

    pieces: tuple[CapturedGraph, ...]
    calls: tuple[_Call, ...]

    def replay(self, attention: AttentionStep, num_tokens: int) -> None:
        """Replay with the step's own attention."""
        for piece, call in zip(self.pieces, self.calls, strict=False):
            piece.replay()
            given = (t[:num_tokens] for t in (call.query, call.key, call.value))
            call.result[:num_tokens].copy_(attention.attend(call.layer, *given))
        self.pieces[-1].replay()

    def release(self) -> None:
        for piece in self.pieces:
            piece.release()
