"""The rows of an encoder-decoder's step: what its decoder reads, and where in the paged cache keys are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.errors import RequestError
from model_server.runner.runner import ModelInputs, RequestState


@dataclass(frozen=True, slots=True)
class DecoderRows:
    """One flattened forward of the decoder over `n` tokens."""

    ids: Tensor  # [n] int64
    positions: Tensor  # [n] int64, of the decoder's tokens
    own: AttentionMetadata  # of its own keys
    crossing: AttentionMetadata  # of what it reads of the encoder's output: every row sees all of its prompt
    prompts: tuple[Tensor, ...] = ()  # the ids of the step's prompts
    encoded_slots: Tensor | None = None  # where keys of the prompts' tokens are stored, in order
    # Rows with logits, in order; None: all. Some are not known: of a prompt's tokens but the last.
    picked: Tensor | None = None  # [num_rows] int64
    unknown: Tensor | None = None  # [num_rows, 1] bool


class RowLayout:
    """Makes the rows of steps."""

    def __init__(self, prefix: Sequence[int], device: torch.device) -> None:
        """Take the decoder's tokens before the first generated one."""
        self._prefix = torch.tensor(prefix, dtype=torch.int64, device=device)
        self._block_size = 0
        self._device = device
        # Of the last step's requests: states, lengths of prompts on both sides, first blocks of the decoder's own keys.
        self._states: Sequence[RequestState] = ()
        self._prompts: list[int] = []
        self._prompt_lengths = self._first_blocks = torch.zeros(0)

    def rows(self, inputs: ModelInputs, block_size: int) -> DecoderRows:
        """Lay out a step over a cache with blocks of this size.

        Raises:
            RequestError: A prompt comes in parts.
        """
        metadata = inputs.attention
        if inputs.states is not self._states or block_size != self._block_size:
            self._states, self._block_size = inputs.states, block_size
            self._prompts = [state.prompt_length for state in inputs.states]
            self._prompt_lengths = torch.tensor(self._prompts, dtype=torch.int32, device=self._device)
            self._first_blocks = -(-self._prompt_lengths // self._block_size).long().unsqueeze(1)
        counts, lengths = metadata.query_lengths_host, metadata.kv_lengths_host
        if metadata.is_decode and all(map(int.__lt__, self._prompts, lengths)):
            return self._decode(inputs)
        starts = [length - count for length, count in zip(lengths, counts, strict=True)]
        for start, length, prompt in zip(starts, lengths, self._prompts, strict=True):
            if start < prompt and (start or length < prompt):
                raise RequestError("an encoder takes its prompt as a whole")
        return self._with_prompts(inputs, starts)

    def _decode(self, inputs: ModelInputs) -> DecoderRows:
        """Lay out a step of one token for each request."""
        metadata = inputs.attention
        shift = len(self._prefix)
        own_lengths = metadata.kv_lengths - self._prompt_lengths + shift
        own_host = tuple(
            [length - prompt + shift for length, prompt in zip(metadata.kv_lengths_host, self._prompts, strict=True)]
        )
        positions = (own_lengths - 1).long()
        tables = self._own_tables(metadata.block_tables, max(own_host))
        own = AttentionMetadata(
            slots=self._slots(tables, positions),
            block_tables=tables,
            cu_seqlens_q=metadata.cu_seqlens_q,
            kv_lengths=own_lengths,
            query_lengths_host=metadata.query_lengths_host,
            kv_lengths_host=own_host,
        )
        crossing = AttentionMetadata(
            slots=own.slots,
            block_tables=metadata.block_tables,
            cu_seqlens_q=metadata.cu_seqlens_q,
            kv_lengths=self._prompt_lengths,
            query_lengths_host=metadata.query_lengths_host,
            kv_lengths_host=tuple(self._prompts),
        )
        return DecoderRows(inputs.input_ids, positions, own, crossing, picked=inputs.logit_rows)

    def _with_prompts(self, inputs: ModelInputs, starts: Sequence[int]) -> DecoderRows:
        """Lay out a step with prompts, or with several tokens of a request."""
        metadata, shift = inputs.attention, len(self._prefix)
        ids: list[Tensor] = []
        prompts: list[Tensor] = []
        encoded_slots: list[Tensor] = []
        firsts: list[int] = []  # the position of each request's first row
        counts: list[int] = []
        first_rows: list[int] = []  # the decoder's row of each request's first token, which may be before the others
        row = at = 0
        for prompt, start, count in zip(self._prompts, starts, metadata.query_lengths_host, strict=True):
            tokens = inputs.input_ids[row : row + count]
            if start == 0:
                prompts.append(tokens[:prompt])
                encoded_slots.append(metadata.slots[row : row + prompt])
                tokens = torch.cat([self._prefix, tokens[prompt:]])
            firsts.append(0 if start == 0 else start - prompt + shift)
            first_rows.append(at + shift - prompt if start == 0 else at)
            ids.append(tokens)
            counts.append(len(tokens))
            row += count
            at += len(tokens)
        sequences = self._index([i for i, count in enumerate(counts) for _ in range(count)])
        positions = self._index([first + j for first, n in zip(firsts, counts, strict=True) for j in range(n)])
        ends = [first + n for first, n in zip(firsts, counts, strict=True)]
        tables = self._own_tables(metadata.block_tables, max(ends))
        cumulative = [0]
        for count in counts:
            cumulative.append(cumulative[-1] + count)
        own = AttentionMetadata(
            slots=self._slots(tables.index_select(0, sequences), positions),
            block_tables=tables,
            cu_seqlens_q=self._index(cumulative).int(),
            kv_lengths=self._index(ends).int(),
            query_lengths_host=tuple(counts),
            kv_lengths_host=tuple(ends),
        )
        # Each row is a sequence of its own: it sees all of the prompt, whatever is beside it.
        crossing = AttentionMetadata(
            slots=own.slots,
            block_tables=metadata.block_tables.index_select(0, sequences),
            cu_seqlens_q=torch.arange(at + 1, dtype=torch.int32, device=self._device),
            kv_lengths=self._prompt_lengths.index_select(0, sequences),
            query_lengths_host=(1,) * at,
            kv_lengths_host=tuple([prompt for prompt, n in zip(self._prompts, counts, strict=True) for _ in range(n)]),
        )
        picked, unknown = self._picked(inputs, starts, first_rows)
        return DecoderRows(
            torch.cat(ids),
            positions,
            own,
            crossing,
            tuple(prompts),
            torch.cat(encoded_slots) if prompts else None,
            picked,
            unknown,
        )

    def _picked(
        self, inputs: ModelInputs, starts: Sequence[int], first_rows: Sequence[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the decoder's rows of the wanted logits, and which of them are not known."""
        counts = inputs.attention.query_lengths_host
        places: list[int] = []
        known: list[bool] = []
        for prompt, start, count, first in zip(self._prompts, starts, counts, first_rows, strict=True):
            places += [first + j for j in range(count)]
            known += [start > 0 or j >= prompt - 1 for j in range(count)]
        wanted = range(len(places)) if inputs.logit_rows is None else inputs.logit_rows.tolist()
        unknown = [not known[row] for row in wanted]
        picked = self._index([places[row] if known[row] else 0 for row in wanted])
        if not any(unknown):
            return picked, None
        return picked, torch.tensor(unknown, device=self._device).unsqueeze(1)

    def _own_tables(self, tables: Tensor, longest: int) -> Tensor:
        """Return the blocks of the decoder's own keys [requests, m], of which the longest request has so many."""
        columns = self._first_blocks + torch.arange(-(-longest // self._block_size), device=self._device)
        return tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))

    def _slots(self, tables: Tensor, positions: Tensor) -> Tensor:
        """Return where the keys at `positions` [n] are stored, by tables [n, m]."""
        size = self._block_size
        blocks = tables.gather(1, (positions // size).unsqueeze(1)).squeeze(1).long()
        return blocks * size + positions % size

    def _index(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
