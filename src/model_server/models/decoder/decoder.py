"""The one native decoder: blocks around a residual stream, over a flattened batch.

Built by `build`. Plain objects instead of `nn.Module`: on a CPU at batch 1 the interpreter's share of a step matters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from model_server.adapters.rows import CurrentRows
from model_server.attention.backend import AttentionBackend, AttentionStep
from model_server.attention.latent import LatentBackend
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.reference import ReferenceBackend
from model_server.attention.two_ways import AheadInWindows
from model_server.layers.embedding import InputEmbedding
from model_server.layers.rotary import Rotary
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.adapters.sites import AdapterSites
from model_server.models.decoder.blocks import Block, Stream, residual_norm
from model_server.models.decoder.cpp_encoder_stack import CppEncoderStack
from model_server.models.decoder.cpp_stack import CppStack, cpp_stack
from model_server.models.decoder.layer_inputs import LayerInputs
from model_server.models.decoder.parts import Step
from model_server.models.decoder.vocabulary import Output
from model_server.recurrence.segments import Segments
from model_server.recurrence.states import StatePool
from model_server.recurrence.step import RecurrentStep, plan_step
from model_server.runner.runner import ModelInputs, RequestState, RunnerTraits, TokenRow

_SEES_AHEAD = ReferenceBackend()


@dataclass(frozen=True, slots=True)
class Rows:
    """What stages pass on of a token."""

    # Hidden states, then its vectors for the layers to come (0: there are none).
    hidden_size: int
    vector_width: int
    # Of this stage and those behind it, and of this stage.
    num_layers: int
    num_own: int
    dtype: torch.dtype

    @property
    def received(self) -> TokenRow:
        return TokenRow(self.hidden_size + self.num_layers * self.vector_width, self.dtype)

    @property
    def passed_on(self) -> TokenRow:
        return TokenRow(self.hidden_size + (self.num_layers - self.num_own) * self.vector_width, self.dtype)

    def split(self, row: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return hidden states, and vectors [n, num_layers, vector_width]."""
        if not self.vector_width:
            return row, None
        vectors = row[:, self.hidden_size :].view(len(row), self.num_layers, self.vector_width)
        return row[:, : self.hidden_size].contiguous(), vectors

    def join(self, hidden: Tensor, vectors: Tensor | None) -> Tensor:
        """Return what is passed on."""
        return hidden if vectors is None else torch.cat((hidden, vectors[:, self.num_own :].flatten(1)), dim=1)


class Decoder:
    """The layers of one stage on this rank, a `runner.Runner`; used inside `torch.inference_mode`."""

    def __init__(
        self,
        *,
        embedding: InputEmbedding | None,
        blocks: list[Block],
        output: Output | None,
        rotaries: tuple[Rotary, ...],
        attention: AttentionBackend,
        vocab_size: int,
        max_positions: int | None,
        weight_bytes: int,
        # What goes between stages.
        stream: Rows,
        stack: CppStack | CppEncoderStack | None = None,
        bidirectional: bool = False,
        adapters: AdapterSites | None = None,
        first_layer: int = 0,
        has_mixers: bool = False,
        # What these keep of requests beside their blocks.
        states: StatePool | None = None,
        layer_inputs: LayerInputs | None = None,
        # [vocab_size] int64: the id whose embedding each id has; None: its own.
        embedded_as: Tensor | None = None,
    ) -> None:
        # None without the first layer: hidden states come instead of ids.
        self._embedding = embedding
        self._blocks = blocks
        # None without the last layer: hidden states go out instead of logits.
        self._output = output
        self._rotaries = rotaries
        self._attention = attention
        self._kv_shapes = tuple(block.attention.kv_shape for block in blocks)
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        # All blocks in one, for the steps that it takes.
        self._stack = stack
        self._stream = stream
        self._first_layer = first_layer
        # Some layers have something else than attention.
        self._has_mixers = has_mixers
        self._states = states
        self._layer_inputs = layer_inputs
        self._embedded_as = embedded_as
        self.bidirectional = bidirectional
        self.adapters = adapters
        self._kept_layers: tuple[int, ...] = ()
        self._parts: list[tuple[int, CppStack]] = []  # the stack, cut before the layers whose inputs are kept
        self._current = CurrentRows() if adapters is None else adapters.current
        self.traits = RunnerTraits(
            attention=attention,
            capturable=attention.capturable and all(block.mlp.capturable for block in blocks) and states is None,
            recurrent=states,
            in_pieces=not has_mixers and not (isinstance(attention, LatentBackend) and attention.is_sparse),
            position_rows=None if embedding is None else embedding.position_rows,
            weight_bytes=weight_bytes,
            adapters=() if adapters is None else adapters.names,
            slots=None if adapters is None else adapters.slots,
            received=stream.received if embedding is None else None,
            passed_on=stream.passed_on if output is None else None,
        )

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def output(self) -> Output | None:
        """Return the output, whose head drafts too, for drafters without one."""
        # None without the last layer: hidden states go out instead of logits.
        return self._output

    @property
    def max_positions(self) -> int | None:
        return self._max_positions

    @property
    def kv_shapes(self) -> tuple[KvShape, ...]:
        return self._kv_shapes

    def set_longest(self, longest: int) -> None:
        """Rotations that depend on it are chosen."""
        for rotary in self._rotaries:
            rotary.set_longest(longest)

    def reserve_positions(self, max_positions: int) -> None:
        """Prepare for the longest sequence."""
        for rotary in self._rotaries:
            rotary.reserve(max_positions + 1)

    def keep_inputs(self, layers: Sequence[int]) -> None:
        """Keep what these layers read in steps with `Kept` hidden states."""
        self._kept_layers = tuple(layers)
        if self._stack is None:
            return
        cuts = sorted({0, len(self._blocks), *layers})
        for start, stop in pairwise(cuts):
            part = cpp_stack(self._blocks[start:stop], 1, start)
            assert part is not None, "each of them is in the whole stack"
            self._parts.append((start, part))

    def embed(self, ids: Tensor) -> Tensor:
        """Embed ids [n] as [n, hidden], without positions or adapters."""
        assert self._embedding is not None
        self._current.rows = None
        known = ids if self._embedded_as is None else self._embedded_as.index_select(0, ids)
        return self._embedding(known, torch.zeros_like(ids))

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """Compute logits; tokens without are dropped after the last attention.

        Returns:
            Without an output the stream [num_tokens, hidden]; without a head hidden states of `logit_rows`.
        """
        self._current.rows = inputs.adapters
        metadata, positions = inputs.attention, inputs.positions
        step = Step(
            positions=positions if positions.dim() == 1 else positions[0],
            # Positions may count from 1.
            rotations=tuple(r.rotations(positions, metadata.max_kv_length + 1) for r in self._rotaries),
            slots=metadata.slots,
            cache=cache,
            attention=inputs.attention_step or self._start(metadata, cache),
            is_decode=metadata.is_decode,
            segments=Segments(metadata, cache.block_size) if self._has_mixers and self._states is None else None,
            states=self._states,
            recurrent=self._recurrent(inputs, cache, self._states),
        )
        kept = inputs.kept
        rows_last = kept is not None and kept.all_tokens and inputs.logit_rows is not None
        kept_rows = None if self._output is None or rows_last else inputs.logit_rows
        ids = inputs.input_ids if self._embedded_as is None else self._embedded_as.index_select(0, inputs.input_ids)
        first, vectors = self._first(ids, inputs, step)
        if vectors is not None:
            step = dataclasses.replace(step, layer_inputs=vectors)
        hidden, added = self._through_blocks(first, step, inputs, kept_rows)
        if self._output is None:
            return self._stream.join(residual_norm(None, hidden, added)[0], vectors)
        hidden = self._output.before_head(hidden, added)
        if kept is not None:
            kept.final = hidden
        if rows_last and inputs.logit_rows is not None:
            hidden = hidden.index_select(0, inputs.logit_rows)
        return hidden if self._output.head is None else self._output.head(hidden, inputs.output)

    def _recurrent(self, inputs: ModelInputs, cache: KvCache, states: StatePool | None) -> RecurrentStep | None:
        if states is None:
            return None
        metadata = inputs.attention
        # Without requests all segments are whole, and forgotten after the step.
        requests = inputs.states or [RequestState(0, slot) for slot, _ in enumerate(metadata.query_lengths_host)]
        return plan_step(metadata, cache.block_size, states, requests)

    def _start(self, metadata: AttentionMetadata, cache: KvCache) -> AttentionStep:
        """Begin attention; libraries' kernels know causal masks only."""
        if metadata.last_keys is None:
            return self._attention.start(metadata, cache)
        ahead = (self._attention if self._attention.sees_ahead else _SEES_AHEAD).start(metadata, cache)
        if not metadata.ahead_in_windows:
            return ahead
        causal = dataclasses.replace(metadata, last_keys=None, first_keys=None, ahead_in_windows=False)
        return AheadInWindows(self._attention.start(causal, cache), ahead)

    def _first(self, ids: Tensor, inputs: ModelInputs, step: Step) -> tuple[Tensor, Tensor | None]:
        """Return what the first block reads, [num_tokens, hidden], and the layers' vectors."""
        if self._embedding is not None:
            hidden = self._embedding(ids, step.positions, inputs.embeddings, inputs.token_types)
            vectors = None if self._layer_inputs is None else self._layer_inputs(ids, hidden)
            return hidden.to(self._stream.dtype), vectors
        assert inputs.hidden is not None, "the ranks with the layers before have computed it"
        return self._stream.split(inputs.hidden)

    def _through_blocks(self, hidden: Tensor, step: Step, inputs: ModelInputs, kept_rows: Tensor | None) -> Stream:
        wanted = () if inputs.kept is None else self._kept_layers
        found: dict[int, Tensor] = {}
        deep = [(row, layers[self._first_layer :]) for row, layers in inputs.deep_embeddings]
        is_deep = any(len(layers) for _, layers in deep)
        if self._stack is not None and not is_deep and self._stack.takes(step, hidden):
            for number, part in self._parts if wanted else [(0, self._stack)]:
                if number in wanted:
                    found[number] = hidden.clone()
                is_last = not wanted or number == self._parts[-1][0]
                hidden = part(hidden, step, kept_rows if is_last else None, self._current.rows)
            _keep(inputs, wanted, found)
            return hidden, None
        added = None
        for number, block in enumerate(self._blocks):
            if number in wanted:
                found[number] = hidden.clone() if added is None else hidden + added
            is_last = number == len(self._blocks) - 1
            hidden, added = block(hidden, added, step, kept_rows if is_last else None)
            for first, layers in deep:
                if number < len(layers) and not (is_last and self._output is not None):  # it keeps some rows only
                    hidden[first : first + layers.shape[1]] += layers[number]
        _keep(inputs, wanted, found)
        return hidden, added


def _keep(inputs: ModelInputs, wanted: tuple[int, ...], found: dict[int, Tensor]) -> None:
    if inputs.kept is not None and wanted:
        inputs.kept.inputs = tuple(found[number] for number in wanted)
