"""A batch of one layer of sparse attention over a paged cache, and what it is by its definition, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from parity.protocol import CPU, attention_metadata
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.latent import LatentBackend
from model_server.memory.kv_cache import KvCache, KvShape

HEADS, WIDTH, RANK, INDEX, PAGE = 6, 32, 24, 8, 4
LAYER = AttentionLayer(index=0, num_heads=HEADS, num_kv_heads=1, head_dim=WIDTH, value_dim=RANK, scale=0.2)
SHAPE = KvShape(1, WIDTH, RANK, value_in_key=True, index_dim=INDEX)
TOP_K = 5


class SparseScene:
    """Sequences whose blocks are in any order, in a cache that is NaN elsewhere."""

    def __init__(
        self, batch: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> None:
        noise = torch.Generator().manual_seed(len(batch))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=noise).to(device, dtype)

        self.batch, self.device = batch, device
        self.rows = [random(total, WIDTH) for _, total in batch]
        self.query = random(sum(n for n, _ in batch), HEADS, WIDTH)
        counts = [-(-total // PAGE) for _, total in batch]
        blocks = (torch.randperm(sum(counts), generator=noise) + 1).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        self.cache = KvCache((SHAPE,), sum(counts) + 1, PAGE, dtype, device)
        self.cache.rows[0].fill_(math.nan)
        for table, rows in zip(self.tables, self.rows, strict=True):
            for i, row in enumerate(rows):
                self.cache.rows[0][table[i // PAGE] * PAGE + i % PAGE, :WIDTH] = row
        spans = [(total - queries, total) for queries, total in batch]
        self.metadata = attention_metadata(self.tables, spans, PAGE, device)
        self.key = torch.cat([rows[a:b] for rows, (a, b) in zip(self.rows, spans, strict=True)]).unsqueeze(1)

    def places(self, position: int) -> list[int]:
        """What a query attends to: some keys, the newest first."""
        if position < TOP_K:
            return list(range(position + 1))
        return [(position - 3 * i) % (position + 1) for i in range(TOP_K)]

    def expected(self) -> Tensor:
        found, row = [], 0
        for sequence, (queries, total) in enumerate(self.batch):
            for position in range(total - queries, total):
                keys = self.rows[sequence][self.places(position)].double()
                weights = (self.query[row].double() @ keys.T * LAYER.scale).softmax(-1)
                found.append((weights @ keys[:, :RANK]).flatten())
                row += 1
        return torch.stack(found)

    def attend(self, backend: AttentionBackend) -> Tensor:
        """Of all queries, [n, HEADS * RANK]."""
        step = LatentBackend(backend, is_sparse=True).start(self.metadata, self.cache).sparse(TOP_K)
        assert step is not None
        asked = [(i, p) for i, (n, total) in enumerate(self.batch) for p in range(total - n, total) if p >= TOP_K]
        slots = [[self.slot(i, k) for k in self.places(p)] for i, p in asked]
        assert sum(len(one.visible) for one in step.sequences) == len(asked)
        for one in step.sequences:
            sequence, _ = asked[one.rows.start]
            assert one.visible.flatten().tolist() == [p + 1 for _, p in asked[one.rows]]
            assert one.slots.tolist() == [self.slot(sequence, k) for k in range(self.batch[sequence][1])]
        step.choose(torch.tensor(slots, dtype=torch.int32, device=self.device))
        return step.attend(LAYER, self.query, self.key, self.key[..., :RANK])

    def slot(self, sequence: int, position: int) -> int:
        return self.tables[sequence][position // PAGE] * PAGE + position % PAGE
