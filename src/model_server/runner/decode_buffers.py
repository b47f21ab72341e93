"""Fixed addresses of a captured decode step, and how batches get there."""

from __future__ import annotations

import torch
from torch import Tensor

from model_server.adapters.rows import AdapterBuffers, AdapterRows
from model_server.attention.metadata import AttentionMetadata
from model_server.runner.runner import Kept, ModelInputs, TokenRow


class DecodeBuffers:
    """Inputs and outputs of up to `max_rows` rows with `width` blocks.

    Padding is token 0 at position 0 with slot 0, in block 0, which no sequence gets.
    """

    def __init__(
        self,
        max_rows: int,
        width: int,
        max_length: int,
        output: TokenRow,
        device: torch.device,
        hidden: TokenRow | None = None,
        # Of adapters; 0: none.
        num_slots: int = 0,
    ) -> None:
        self.width = width
        # For the host's plans; true lengths are on the device.
        self.max_length = max_length
        # What a step gives each row.
        self.output = torch.zeros(max_rows, output.width, dtype=output.dtype, device=device)
        # What rows get of the stage before, if anything.
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
        """Return what a step of `num_rows` padded rows reads.

        Args:
            places: Rows of each sequence.
            adapted: Some have adapters.
        """
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
            adapters=AdapterRows(*[self._adapters.of(num_rows)] * 2) if adapted else None,
        )

    def hold(self, kept: Kept) -> None:
        """Copy what a captured step keeps."""
        assert kept.final is not None
        rows = len(kept.final)
        if self._kept_final is None:  # in the warm-up run, which nothing captures
            self._kept_final = kept.final.new_zeros(len(self.output), kept.final.shape[1])
            self._kept_inputs = tuple(one.new_zeros(len(self.output), one.shape[1]) for one in kept.inputs)
        held = [self._kept_final[:rows], *(one[:rows] for one in self._kept_inputs)]
        torch._foreach_copy_(held, [kept.final, *kept.inputs])

    def give(self, kept: Kept, num_rows: int) -> None:
        """Give what the newest replay kept, until the next."""
        assert self._kept_final is not None, "captured steps keep nothing"
        kept.final = self._kept_final[:num_rows]
        kept.inputs = tuple(one[:num_rows] for one in self._kept_inputs)

    def fill(self, inputs: ModelInputs, num_rows: int) -> None:
        """Copy a decode step, and pad up to `num_rows` and over the last step's rows. Wider tables are cut: no keys are
        beyond `max_length`.
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
            self._adapters.fill(inputs.adapters.all, num_rows)
        self._kv_lengths[:rows].copy_(metadata.kv_lengths)
        self._tables[:rows, :width].copy_(tables)
