"""The fixed addresses that a captured decode step reads and writes, and how a batch of any size gets there."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.attention.metadata import AttentionMetadata
from model_server.runner.adapter_buffers import AdapterBuffers, captured_rows
from model_server.runner.runner import Kept, ModelInputs, TokenRow


class DecodeBuffers:
    """Inputs and outputs of up to `max_rows` rows with tables of `width` blocks. Smaller steps use the first rows.

    A row without a sequence is padding: token 0 at position 0, one key, table and slot 0. It reads and writes
    only block 0, which no sequence gets. max_length: the longest sequence, for planning on the host; the
    lengths that count are those on the device. output: what a step gives each row. hidden: what it gets of the stage
    before for each row; None: nothing. num_slots: of adapters; 0: no step has rows of any.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        max_length: int,
        output: TokenRow,
        device: torch.device,
        hidden: TokenRow | None = None,
        num_slots: int = 0,
    ) -> None:
        self.width = width
        self.max_length = max_length
        self.output = torch.zeros(max_rows, output.width, dtype=output.dtype, device=device)
        self._hidden = (
            None if hidden is None else torch.zeros(max_rows, hidden.width, dtype=hidden.dtype, device=device)
        )
        self._ids, self._positions, self._slots = (
            torch.zeros(max_rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._kv_lengths = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._tables = torch.zeros(max_rows, width, dtype=torch.int32, device=device)
        self._cu_seqlens = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._adapters = AdapterBuffers(max_rows, num_slots, device)
        self._filled_rows = 0
        self._filled_width = 0
        self._kept_final: Tensor | None = None
        self._kept_inputs: tuple[Tensor, ...] = ()

    def inputs(self, num_rows: int, places: int = 1, *, adapted: bool = False) -> ModelInputs:
        """What a step of `num_rows` rows reads, the padding included. places: rows of each sequence. adapted: some of
        them have adapters."""
        metadata = AttentionMetadata(
            slots=self._slots[:num_rows],
            block_tables=self._tables[:num_rows],
            cu_seqlens_q=self._cu_seqlens[: num_rows + 1],
            kv_lengths=self._kv_lengths[:num_rows],
            query_lengths_host=(1,) * num_rows,
            kv_lengths_host=(self.max_length,) * num_rows,
            places=places,
        )
        hidden = None if self._hidden is None else self._hidden[:num_rows]
        return ModelInputs(
            self._ids[:num_rows],
            self._positions[:num_rows],
            metadata,
            None,
            hidden=hidden,
            adapters=captured_rows(self._adapters, num_rows) if adapted else None,
        )

    def hold(self, kept: Kept) -> None:
        """Copy what a captured step keeps of its hidden states."""
        assert kept.final is not None
        rows = len(kept.final)
        if self._kept_final is None:  # in the warm-up run, which nothing captures
            self._kept_final = kept.final.new_zeros(len(self.output), kept.final.shape[1])
            self._kept_inputs = tuple(one.new_zeros(len(self.output), one.shape[1]) for one in kept.inputs)
        held = [self._kept_final[:rows], *(one[:rows] for one in self._kept_inputs)]
        torch._foreach_copy_(held, [kept.final, *kept.inputs])

    def give(self, kept: Kept, num_rows: int) -> None:
        """What the newest replay kept of so many rows, until the next one."""
        assert self._kept_final is not None, "captured steps keep nothing"
        kept.final = self._kept_final[:num_rows]
        kept.inputs = tuple(one[:num_rows] for one in self._kept_inputs)

    def fill(self, inputs: ModelInputs, num_rows: int) -> None:
        """Put a decode step into the first rows, and padding into the further rows that the step before used. num_rows:
        of the step that reads it, padding included.

        Its tables may be wider than the buffers': no row's keys reach beyond `max_length`.
        """
        metadata = inputs.attention
        rows = inputs.input_ids.shape[0]
        tables = metadata.block_tables
        if tables.shape[1] > self.width:
            tables = tables[:, : self.width]
        width = tables.shape[1]
        if rows < self._filled_rows:
            gone = slice(rows, self._filled_rows)
            torch._foreach_zero_([self._ids[gone], self._positions[gone], self._slots[gone], self._tables[gone]])
            self._kv_lengths[gone].fill_(1)
        if width < self._filled_width:
            self._tables[:rows, width : self._filled_width].zero_()
        self._filled_rows, self._filled_width = rows, width
        # One launch where the copies are alike, and none that waits.
        torch._foreach_copy_(
            [self._ids[:rows], self._positions[:rows], self._slots[:rows]],
            [inputs.input_ids, inputs.positions, metadata.slots],
        )
        if self._hidden is not None:
            assert inputs.hidden is not None, "the stage before has computed it"
            self._hidden[:rows].copy_(inputs.hidden)
            self._hidden[rows:num_rows].zero_()  # a step may write into what it gets
        if inputs.adapters is not None:
            self._adapters.fill(inputs.adapters.tiles, inputs.adapters.slots, num_rows)
        self._kv_lengths[:rows].copy_(metadata.kv_lengths)
        self._tables[:rows, :width].copy_(tables)
