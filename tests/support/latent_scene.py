"""A batch of one layer of latent attention over a paged cache, and what it is by its definition, in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from parity.protocol import attention_metadata
from torch import Tensor

from model_server.attention.backend import AttentionBackend, AttentionLayer
from model_server.attention.latent import LatentBackend, LatentHeads, LatentLayer
from model_server.memory.kv_cache import KvCache, KvShape

HEADS, PLAIN, ROTATED, VALUE, RANK = 6, 8, 8, 12, 24
SCALE = (PLAIN + ROTATED) ** -0.5


def latent_layer(heads: LatentHeads | None = None) -> LatentLayer:
    """Of the sizes above; with `heads`, of theirs. After a long prefix, runs of more than 17 queries are expanded."""
    if heads is None:
        heads = LatentHeads(torch.zeros(HEADS, PLAIN, RANK), torch.zeros(HEADS, RANK, VALUE))
    num_heads, plain, rank = heads.up_key.shape
    absorbed = AttentionLayer(
        index=0, num_heads=num_heads, num_kv_heads=1, head_dim=rank + ROTATED, value_dim=rank, scale=SCALE
    )
    return LatentLayer(
        index=0,
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=plain + ROTATED,
        value_dim=heads.up_value.shape[2],
        scale=SCALE,
        heads=heads,
        absorbed=absorbed,
    )


class LatentScene:
    """batch: (query tokens, tokens in all) of each sequence. The cache is NaN wherever nothing was written."""

    def __init__(
        self,
        batch: Sequence[tuple[int, int]],
        *,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
    ) -> None:
        self.device = device or torch.device("cpu")
        noise = torch.Generator().manual_seed(sum(total for _, total in batch))

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=noise).to(self.device, dtype)

        self.batch = list(batch)
        self.page, self.dtype = page, dtype
        self.layer = latent_layer(LatentHeads(random(HEADS, PLAIN, RANK), random(HEADS, RANK, VALUE)))
        self.stored = [random(total, RANK + ROTATED) for _, total in batch]
        self.queries = [random(queries, HEADS, ROTATED + PLAIN) for queries, _ in batch]
        counts = [-(-total // page) for _, total in batch]
        self.cache = KvCache(
            (KvShape(1, RANK + ROTATED, RANK, value_in_key=True),), sum(counts) + 1, page, dtype, self.device
        )
        self.cache.rows[0].fill_(math.nan)
        blocks = (torch.randperm(sum(counts), generator=noise) + 1).tolist()
        self.tables = [[blocks.pop() for _ in range(count)] for count in counts]
        for table, rows in zip(self.tables, self.stored, strict=True):
            for i, row in enumerate(rows):
                self.cache.rows[0][table[i // page] * page + i % page] = row

    def attend(self, backend: AttentionBackend, spans: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Of all queries, or of those at positions [start, stop) of each sequence: [n, HEADS * VALUE]."""
        if spans is None:
            spans = [(total - queries, total) for queries, total in self.batch]
        firsts = [total - queries for queries, total in self.batch]
        metadata = attention_metadata(self.tables, spans, self.page, self.device)
        query = torch.cat(
            [q[a - first : b - first] for q, (a, b), first in zip(self.queries, spans, firsts, strict=True)]
        )
        key = torch.cat([rows[a:b] for rows, (a, b) in zip(self.stored, spans, strict=True)]).unsqueeze(1)
        step = LatentBackend(backend).start(metadata, self.cache)
        return step.attend(self.layer, query, key, key[..., :RANK])

    def expected(self) -> Tensor:
        """Softmax of all scores, with every key and value written out; float64."""
        heads = self.layer.heads
        results = []
        for (queries, total), rows, query in zip(self.batch, self.stored, self.queries, strict=True):
            latents, rotated = rows[:, :RANK].double(), rows[:, RANK:].double()
            keys = torch.einsum("tr,hpr->htp", latents, heads.up_key.double())
            values = torch.einsum("tr,hrv->htv", latents, heads.up_value.double())
            scores = torch.einsum("nhd,td->hnt", query[..., :ROTATED].double(), rotated)
            scores = (scores + torch.einsum("nhp,htp->hnt", query[..., ROTATED:].double(), keys)) * SCALE
            at = torch.arange(total - queries, total, device=self.device).unsqueeze(1)
            hidden = torch.arange(total, device=self.device) > at
            weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
            results.append(torch.einsum("hnt,htv->nhv", weights, values).flatten(1))
        return torch.cat(results)
