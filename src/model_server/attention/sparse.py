"""Sparse attention (DeepSeek V3.2): a query that sees more keys than `top_k` attends to those that an indexer chose."""

# Queries that see fewer attend as ever. To the backend each other one is a sequence of `top_k` keys, in blocks of one
# token: its table lists the slots that were chosen.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer, AttentionStep
from model_server.attention.metadata import AttentionMetadata
from model_server.memory.kv_cache import KvCache
from model_server.memory.transfer import upload


@dataclass(frozen=True, slots=True)
class Choosing:
    """Queries of one sequence that see more than `top_k` keys."""

    rows: slice  # among all such queries of the step
    slots: Tensor  # [n] int64: of the keys that the last of them sees, in their order
    visible: Tensor  # [queries, 1] int64: how many of them each sees


class SparseStep:
    """One forward in which some query sees more than `top_k` keys."""

    def __init__(self, backend: AttentionBackend, metadata: AttentionMetadata, cache: KvCache, top_k: int) -> None:
        assert metadata.last_keys is None, "tokens see those before them"
        self.top_k = top_k
        self._backend, self._metadata, self._cache = backend, metadata, cache.by_token()
        lengths = list(zip(metadata.query_lengths_host, metadata.kv_lengths_host, strict=True))
        # Of each sequence, how many queries see at most `top_k` keys.
        self._few = [min(queries, max(0, top_k - keys + queries)) for queries, keys in lengths]
        firsts = list(accumulate(metadata.query_lengths_host, initial=0))
        self._dense = self._without_choice(cache, firsts)
        self.tokens = self._index([t for i, n in enumerate(self._few) for t in range(firsts[i] + n, firsts[i + 1])])
        self.sequences = tuple(self._sequences(cache.block_size))
        self._rest = self._with_choice()
        self._chosen: AttentionStep | None = None

    def choose(self, slots: Tensor) -> None:
        """Set slots [n, top_k] int32 for this layer, and for those after it that choose nothing."""
        self._chosen = self._backend.start(replace(self._rest, block_tables=slots), self._cache)

    def attend(self, layer: AttentionLayer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend with absorbed queries."""
        assert self._chosen is not None, "a layer before this one has chosen"
        output = query.new_empty(query.shape[0], layer.num_heads * layer.value_dim)
        steps = [(self.tokens, self._chosen), *([] if self._dense is None else [self._dense])]
        for tokens, step in steps:
            output[tokens] = step.attend(layer, query[tokens], key[tokens], value[tokens])
        return output

    def _without_choice(self, cache: KvCache, firsts: Sequence[int]) -> tuple[slice | Tensor, AttentionStep] | None:
        """Return the queries that see few keys, and their step."""
        whole, few = self._metadata, self._few
        some = [i for i, n in enumerate(few) if n]
        if not some:
            return None
        tokens = self._index([t for i in some for t in range(firsts[i], firsts[i] + few[i])])
        index = upload(torch.tensor(some), whole.slots.device)
        left = [whole.query_lengths_host[i] - few[i] for i in some]
        single = np.array(
            [few[i] == 1 and (rest > 0 or self._is_of_prompt(i)) for i, rest in zip(some, left, strict=True)]
        )
        metadata = AttentionMetadata(
            slots=whole.slots[tokens],
            block_tables=whole.block_tables.index_select(0, index),
            cu_seqlens_q=self._counted(list(accumulate((few[i] for i in some), initial=0))),
            kv_lengths=whole.kv_lengths.index_select(0, index) - self._counted(left),
            query_lengths_host=tuple(few[i] for i in some),
            kv_lengths_host=tuple(whole.kv_lengths_host[i] - rest for i, rest in zip(some, left, strict=True)),
            single_prompts=single.astype(np.uint8) if single.any() else None,
        )
        return tokens, self._backend.start(metadata, cache)

    def _sequences(self, block_size: int) -> list[Choosing]:
        whole, found = self._metadata, []
        first = 0
        for i, (queries, keys) in enumerate(zip(whole.query_lengths_host, whole.kv_lengths_host, strict=True)):
            count = queries - self._few[i]
            if not count:
                continue
            positions = torch.arange(keys, device=whole.slots.device)
            slots = whole.block_tables[i].long()[positions // block_size] * block_size + positions % block_size
            visible = whole.kv_lengths[i] - torch.arange(count - 1, -1, -1, device=whole.slots.device)
            found.append(Choosing(slice(first, first + count), slots, visible.unsqueeze(1)))
            first += count
        return found

    def _with_choice(self) -> AttentionMetadata:
        """Describe the other queries as sequences, without tables."""
        whole, count = self._metadata, sum(one.rows.stop - one.rows.start for one in self.sequences)
        visible = torch.cat([one.visible for one in self.sequences]).flatten()
        of_prompts = np.repeat(
            [queries > 1 or self._is_of_prompt(i) for i, queries in enumerate(whole.query_lengths_host)],
            [queries - few for queries, few in zip(whole.query_lengths_host, self._few, strict=True)],
        )
        return AttentionMetadata(
            slots=whole.slots[self.tokens],
            block_tables=whole.block_tables,
            cu_seqlens_q=torch.arange(count + 1, dtype=torch.int32, device=whole.slots.device),
            kv_lengths=visible.clamp(max=self.top_k).int(),
            query_lengths_host=(1,) * count,
            kv_lengths_host=(self.top_k,) * count,
            single_prompts=of_prompts.astype(np.uint8) if of_prompts.any() else None,
        )

    def _is_of_prompt(self, sequence: int) -> bool:
        """Whether a single query is of its prompt."""
        flags = self._metadata.single_prompts
        return flags is not None and bool(flags[sequence])

    def _index(self, tokens: Sequence[int]) -> slice | Tensor:
        """Index ascending tokens, by a slice if adjacent."""
        if tokens[-1] - tokens[0] + 1 == len(tokens):
            return slice(tokens[0], tokens[-1] + 1)
        return upload(torch.tensor(tokens), self._metadata.slots.device)

    def _counted(self, numbers: Sequence[int]) -> Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int32), self._metadata.slots.device)
