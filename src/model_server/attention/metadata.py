"""Where the tokens of one forward are in the paged KV cache. An explicit argument of every model, never a global."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One flattened, unpadded forward over `num_seqs` sequences with `num_tokens` query tokens in all.

    Slot = block * block_size + offset: a row of the flattened cache. The step's own K/V are written to `slots` before
    attention reads, so `kv_lengths` counts them. Query token j of sequence i is at position
    kv_lengths[i] - query_lengths[i] + j and sees the keys up to and including its own position, if `last_keys` does not
    say more: tokens of an image may see each other both ways. `first_keys` is the first key that a query sees in a
    layer with a window, -1 where the window says it. Both are for steps of prompts: all keys are below the kv_length,
    neither decreases within a sequence, and a sequence with one query sees up to itself.

    In a step of single queries every `places` sequences that follow each other may be one: its queries at as many
    positions, the table repeated, with padding (one key, slot 0, a table of zeros) behind the first.

    adapters: numbers of the LoRA adapters of the sequences of a step with prompts, for attention whose keys they
    change; None: all have the base model.

    The `_host` fields hold the same numbers as plain ints, so that no backend has to ask the device for them.
    """

    slots: Tensor  # [num_tokens] int64
    block_tables: Tensor  # [num_seqs, max_blocks] int32; unused entries are 0, the reserved block
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32
    kv_lengths: Tensor  # [num_seqs] int32
    query_lengths_host: tuple[int, ...]  # [num_seqs]
    kv_lengths_host: tuple[int, ...]  # [num_seqs]
    last_keys: Tensor | None = None  # [num_tokens] int64
    first_keys: Tensor | None = None  # [num_tokens] int64, beside last_keys
    places: int = 1
    adapters: tuple[int, ...] | None = None  # [num_seqs]

    @property
    def is_decode(self) -> bool:
        """Every sequence has exactly one query token."""
        return len(self.query_lengths_host) == self.slots.shape[0]

    @property
    def max_query_length(self) -> int:
        return max(self.query_lengths_host)

    @property
    def max_kv_length(self) -> int:
        return max(self.kv_lengths_host)
