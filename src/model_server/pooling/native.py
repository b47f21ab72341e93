"""Hidden states of the native decoder: tokens see ahead; keys and values stay for one layer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.attention.two_ways import TwoWays
from model_server.memory.kv_cache import KvCache
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.spec import Spec
from model_server.pooling.batch import FlatBatch
from model_server.runner.runner import ModelInputs

# The scratch cache grows by so many tokens at least, so that this is rare.
_GROWTH = 1024


class NativeModel:
    """A decoder or encoder of `models.decoder`."""

    def __init__(self, decoder: Decoder, spec: Spec, dtype: torch.dtype, device: torch.device) -> None:
        backend = decoder.traits.attention
        assert backend is not None
        self._decoder = decoder
        self._backend: AttentionBackend = backend
        self._windows = sorted({window for window in spec.windows if window is not None})
        self._dtype = dtype
        self._device = device
        self._cache: KvCache | None = None
        self.hidden_size = spec.hidden_size
        self.vocab_size = spec.vocab_size
        self.typed = spec.names.token_types is not None
        self.weight_bytes = decoder.traits.weight_bytes

    @property
    def max_positions(self) -> int | None:
        return self._decoder.max_positions

    def set_longest(self, longest: int) -> None:
        self._decoder.set_longest(longest)

    def hidden(self, batch: FlatBatch) -> Tensor:
        """Behind the last norm, [num_tokens, hidden]."""
        layout = _Layout(batch, self._backend.block_size)
        cache = self._scratch(layout.num_blocks)
        positions = batch.host_positions
        ends = np.repeat(np.array(batch.lengths, dtype=np.int64) - 1, batch.lengths)
        metadata = layout.metadata(self._device, ends if self._decoder.bidirectional else None)
        step: AttentionStep | None = None
        if self._decoder.bidirectional and self._windows:
            windows = {
                window: self._backend.start(
                    layout.metadata(self._device, np.minimum(ends, positions + window - 1)), cache
                )
                for window in self._windows
            }
            step = TwoWays(self._backend.start(metadata, cache), windows)
        inputs = ModelInputs(
            input_ids=batch.input_ids,
            positions=torch.from_numpy(positions).to(self._device),
            attention=metadata,
            logit_rows=None,
            attention_step=step,
            token_types=batch.token_types,
        )
        return self._decoder.forward(inputs, cache)

    def _scratch(self, num_blocks: int) -> KvCache:
        block_size = self._backend.block_size
        if self._cache is None or self._cache.num_blocks < num_blocks:
            self._cache = None  # its memory first
            wanted = max(num_blocks, _GROWTH // block_size)
            self._cache = KvCache.scratch(self._decoder.kv_shapes, wanted, block_size, self._dtype, self._device)
        return self._cache


class _Layout:
    """Gives each text the scratch blocks behind the one before."""

    def __init__(self, batch: FlatBatch, block_size: int) -> None:
        self._batch = batch
        lengths = np.array(batch.lengths, dtype=np.int64)
        counts = -(-lengths // block_size)
        firsts = np.cumsum(counts) - counts + 1  # block 0 is reserved
        self.num_blocks = int(counts.sum()) + 1
        self._slots = np.repeat(firsts * block_size, lengths) + batch.host_positions
        places = np.arange(int(counts.max()), dtype=np.int64)
        self._tables = np.where(places < counts[:, None], firsts[:, None] + places, 0).astype(np.int32)

    def metadata(
        self, device: torch.device, last_keys: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    ) -> AttentionMetadata:
        batch = self._batch
        return AttentionMetadata(
            slots=torch.from_numpy(self._slots).to(device),
            block_tables=torch.from_numpy(self._tables).to(device),
            cu_seqlens_q=torch.tensor(batch.starts, dtype=torch.int32, device=device),
            kv_lengths=torch.tensor(batch.lengths, dtype=torch.int32, device=device),
            query_lengths_host=batch.lengths,
            kv_lengths_host=batch.lengths,
            last_keys=None if last_keys is None else torch.from_numpy(last_keys).to(device),
        )
