"""The lightning indexer (DeepSeek V3.2, arXiv 2512.02556): which keys a query of latent attention reads."""

# A key's score is the sum over the indexer's heads of weight * relu(query . key), in float32. Keys are cached beside
# the latents. DeepSeek's own kernels rotate queries and keys by a Hadamard matrix and round them to 8 bits; as in
# transformers, neither is done here.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.attention.sparse import SparseStep
from model_server.cpp.library import TYPES, prepared, usable
from model_server.layers.linear.linear import Linear
from model_server.layers.linear.packed import PackedLinear
from model_server.layers.norm import Norm
from model_server.layers.rotary import Rotations, rotate_
from model_server.layers.routing import RouterLinear
from model_server.memory.kv_cache import copy_rows
from model_server.models.decoder.loader import Loader
from model_server.weights.matrix import HeadOrder, Part
from model_server.weights.products import Product

# Of the norm of keys, whatever the config says of the others.
_EPS = 1e-6
# Most bytes of scores of single heads at once, and of scores from which keys are chosen.
_HEAD_BYTES, _SCORE_BYTES = 32 * 2**20, 8 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSpec:
    """Sizes of an indexer."""

    heads: int
    head_dim: int
    top_k: int
    adjacent: bool  # as `Spec.rope_pairs_adjacent`, of the indexer's own heads
    full: tuple[bool, ...]  # per layer: it has an indexer, others read what the last such layer chose

    def is_full(self, index: int) -> bool:
        """Whether layer `index` has an indexer."""
        # As every layer behind the model's has.
        return index >= len(self.full) or self.full[index]

    def products(self, hidden_size: int, query_rank: int) -> dict[str, tuple[int, int]]:
        """List the products."""
        return {
            "indexer.wq_b": (query_rank, self.heads * self.head_dim),
            "indexer.wk": (hidden_size, self.head_dim),
            "indexer.weights_proj": (hidden_size, self.heads),
        }

    def load(self, loader: Loader, prefix: str, *, hidden_size: int, query_rank: int, rotated_dim: int) -> Indexer:
        """Load the whole of it on every rank."""
        width, order = self.head_dim, None if self.adjacent else HeadOrder(self.head_dim, rotated_dim)

        def whole(name: str, rows: int, columns: int) -> Linear:
            return loader.column_linear([Part(prefix + name, ((0, rows),), rows, order)], columns)

        def of_norm(name: str) -> Tensor:
            found = loader.vector(f"{prefix}k_norm.{name}", [(0, width)], width)
            return found if order is None else order.apply(found)

        name = prefix + "weights_proj"
        matrix = loader.dense(name, self.heads, hidden_size)
        product = Product(
            parts=(Part(name, ((0, self.heads),), self.heads),), columns=None, weight=lambda: matrix.float()
        )
        return Indexer(
            spec=self,
            rotated_dim=rotated_dim,
            query=whole("wq_b", self.heads * width, query_rank),
            key=whole("wk", width, hidden_size),
            norm=loader.fused.layer_norm(of_norm("weight"), of_norm("bias"), _EPS),
            weights=loader.changes.linear(RouterLinear(matrix, is_wide=True), product),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Indexer:
    """An indexer, which chooses alike on every rank."""

    spec: IndexerSpec
    rotated_dim: int
    query: Linear
    key: Linear
    norm: Norm
    weights: Linear

    def write(self, hidden: Tensor, rotations: Rotations, rows: Tensor, slots: Tensor) -> None:
        """Cache keys of [n, hidden] in rows [num_slots, head_dim]."""
        keys = self.norm(self.key(hidden))
        rotate_(keys[:, : self.rotated_dim].unsqueeze(1), rotations.gathered)
        copy_rows(rows, slots, keys)

    def choose(self, hidden: Tensor, latents: Tensor, rotations: Rotations, rows: Tensor, step: SparseStep) -> None:
        """Choose by hidden [num_tokens, hidden] and latents [num_tokens, query_rank]."""
        spec = self.spec
        # Of all tokens: what may be added to products is known of whole steps.
        queries = self.query(latents).view(-1, spec.heads, spec.head_dim)[step.tokens]
        rotate_(queries[..., : self.rotated_dim], rotations.gathered[step.tokens])
        weights = self.weights(hidden)[step.tokens] * (spec.heads * spec.head_dim) ** -0.5
        chosen = torch.empty(len(queries), step.top_k, dtype=torch.int32, device=queries.device)
        for one in step.sequences:
            keys = rows.index_select(0, one.slots)
            score = scorer(keys)
            some = slice(one.rows.start, one.rows.start)
            for visible in torch.split(one.visible, max(1, _SCORE_BYTES // (4 * len(keys)))):
                some = slice(some.stop, some.stop + len(visible))
                scores = score(queries[some], weights[some])
                chosen[some] = one.slots[best_places(scores, visible, step.top_k)]
        step.choose(chosen)


def scorer(keys: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """Return what scores keys [n, dim] for queries [rows, heads, dim] and weights [rows, heads]: [rows, n] float32."""
    if usable(keys.device, keys.dtype) and keys.shape[1] % 2 == 0:
        return _Packed(keys)
    wide = keys.float().t()

    def scores(queries: Tensor, weights: Tensor) -> Tensor:
        at_once = max(1, _HEAD_BYTES // (4 * queries.shape[1] * len(keys)))
        parts = zip(torch.split(queries, at_once), torch.split(weights, at_once), strict=True)
        return torch.cat([(w.unsqueeze(1) @ (q.float() @ wide).relu_()).squeeze(1) for q, w in parts])

    return scores


class _Packed:
    """Keys for the C++ operator, whose scores depend neither on other queries nor on other keys."""

    def __init__(self, keys: Tensor) -> None:
        self._product = PackedLinear(keys, None, arena=None)

    def __call__(self, queries: Tensor, weights: Tensor) -> Tensor:
        (rows, heads, dim), keys = queries.shape, self._product
        if dim != keys.inputs or weights.shape != (rows, heads) or queries.dtype != keys.panels.dtype:
            raise RuntimeError(f"keys of {keys.inputs} numbers, queries {list(queries.shape)} {queries.dtype}")
        queries, weights = queries.contiguous(), weights.float().contiguous()
        out = weights.new_empty(rows, keys.outputs)
        prepared().cpp_index_scores(
            TYPES[queries.dtype],
            keys.panels.data_ptr(),
            keys.outputs,
            dim,
            queries.data_ptr(),
            weights.data_ptr(),
            heads,
            rows,
            out.data_ptr(),
        )
        return out


def best_places(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """Return where the best of the first `visible` [n, 1] scores [n, keys] are: [n, top_k] ascending."""
    # Of equal ones the first; where fewer are visible, these are all in front.
    hidden = torch.arange(scores.shape[1], device=scores.device) >= visible
    if scores.device.type == "cpu":
        best = scores.masked_fill(hidden, -torch.inf).topk(top_k, dim=1, sorted=False)
        if bool(((scores >= best.values.amin(1, keepdim=True)) & ~hidden).sum(1).eq(top_k).all()):
            return best.indices.sort(1).values  # none of the others is equal to the last one
    # What is not a number is a row's own fault, and must leave `top_k` places all the same.
    scores = torch.nan_to_num(scores).masked_fill_(hidden, -torch.inf)
    last = scores.topk(top_k, dim=1, sorted=False).values.amin(1, keepdim=True)
    above, equal = scores > last, scores == last
    missing = top_k - above.sum(1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(1) <= missing))
    return chosen.nonzero()[:, 1].view(len(scores), top_k)
