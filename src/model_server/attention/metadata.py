"""Where the tokens of a forward are in the paged KV cache; an argument of every model, never a global."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One flattened, unpadded forward over `num_seqs` sequences with `num_tokens` queries.

    Token j of sequence i has position kv_lengths[i] - query_lengths[i] + j and sees keys up to itself, unless
    `last_keys` says more. The `_host` fields are the same as plain ints, so that no backend asks the device.
    """

    # Rows of the flattened cache, block * block_size + offset; the step's K and V are written there first, so
    # `kv_lengths` counts them.
    slots: Tensor  # [num_tokens] int64
    block_tables: Tensor  # [num_seqs, max_blocks] int32; unused entries are 0, the reserved block
    cu_seqlens_q: Tensor  # [num_seqs + 1] int32
    kv_lengths: Tensor  # [num_seqs] int32
    query_lengths_host: tuple[int, ...]  # [num_seqs]
    kv_lengths_host: tuple[int, ...]  # [num_seqs]
    last_keys: Tensor | None = None  # [num_tokens] int64
    # The first key that a query sees in a layer with a window that says no earlier one, -1 by the window; only for
    # prompts, as `last_keys`, and neither decreases within a sequence. None: all by the window.
    first_keys: Tensor | None = None  # [num_tokens] int64, beside last_keys
    # Those two count in layers with a window alone.
    ahead_in_windows: bool = False
    # In a step of single queries, how many adjacent ones may be one sequence: its table is repeated, and padding (one
    # key, slot 0) follows the first.
    places: int = 1
    # Numbers of the sequences' LoRA adapters in a step with prompts, where they change keys; None: base model.
    adapters: tuple[int, ...] | None = None  # [num_seqs]
    # 1 for each sequence whose one query is of its prompt (behind a cached prefix, or a chunk). On a CPU it is attended
    # as those of longer chunks are, so that a prompt has the same bits whatever is cached; None: there is none.
    single_prompts: npt.NDArray[np.uint8] | None = None  # [num_seqs], on the host

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
