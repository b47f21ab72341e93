"""Token embedding and output head, divided over the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.distributed.group import ProcessGroup
from model_server.layers.linear.linear import Linear, wide_into
from model_server.layers.norm import Norm


def vocab_range(vocab_size: int, tensor_group: ProcessGroup) -> tuple[int, int]:
    """Return this rank's ids: blocks of ceil(V / size), the last ones perhaps smaller."""
    block = math.ceil(vocab_size / tensor_group.size)
    start = min(vocab_size, tensor_group.rank * block)
    return start, min(vocab_size, start + block)


class Embedding:
    """Rows of token ids [n] as [n, hidden].

    With several ranks `weight` has rows `[start, stop)`; other ids read zeros, and the ranks sum.
    """

    __slots__ = ("_group", "_start", "_weight", "_zero_row")

    def __init__(self, weight: Tensor, start: int, tensor_group: ProcessGroup) -> None:
        self._start = start
        self._group = tensor_group
        self._zero_row = weight.shape[0]
        self._weight = weight if tensor_group.size == 1 else torch.cat((weight, weight.new_zeros(1, weight.shape[1])))

    @property
    def dtype(self) -> torch.dtype:
        return self._weight.dtype

    def __call__(self, ids: Tensor) -> Tensor:
        if self._group.size == 1:
            return F.embedding(ids, self._weight)
        local = ids - self._start
        local.masked_fill_((local < 0) | (local >= self._zero_row), self._zero_row)
        return self._group.all_reduce(F.embedding(local, self._weight))


class TokenEmbedding(Protocol):
    """[n] int64 -> [n, hidden], in memory of its own."""

    def __call__(self, ids: Tensor) -> Tensor: ...


class InputEmbedding:
    """From ids and positions to the first block: scaling, learned positions, norm, widening."""

    __slots__ = ("_embedding", "_multiplier", "_norm", "_offset", "_positions", "_projection", "_types")

    def __init__(
        self,
        embedding: TokenEmbedding,
        *,
        multiplier: Tensor | None = None,
        projection: Linear | None = None,
        # Row p + position_offset is added for position p.
        position_table: Tensor | None = None,
        position_offset: int = 0,
        # The row of a token's type is added.
        type_table: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        self._embedding = embedding
        self._multiplier = multiplier
        # Widens narrower embeddings.
        self._projection = projection
        self._positions = position_table
        self._offset = position_offset
        self._types = type_table
        self._norm = norm

    @property
    def position_rows(self) -> int | None:
        """Return the number of learned positions, if any."""
        return None if self._positions is None else len(self._positions) - self._offset

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        spans: Sequence[tuple[int, Tensor]] = (),
        token_types: Tensor | None = None,
    ) -> Tensor:
        """Embed ids [n] as [n, hidden].

        Args:
            spans: (first row, [m, hidden]) instead of looked-up rows, scaled already; the ids there need only be
                valid.
            token_types: None: all 0.
        """
        hidden = self._embedding(ids)
        if self._multiplier is not None:
            hidden.mul_(self._multiplier)
        if self._projection is not None:
            hidden = self._projection(hidden)
        for first, rows in spans:
            hidden[first : first + len(rows)] = rows
        if self._types is not None:
            hidden = hidden + (self._types[0] if token_types is None else F.embedding(token_types, self._types))
        if self._positions is not None:
            hidden = hidden + F.embedding(positions + self._offset if self._offset else positions, self._positions)
        return hidden if self._norm is None else self._norm(hidden)


class Head:
    """Logits [n, vocab] float32 of hidden [n, hidden], equal on all ranks, times `multiplier`, capped by `softcap`."""

    __slots__ = ("_gathers_rounded", "_group", "_linear", "_multiplier", "_plain", "_sharded", "_softcap")

    def __init__(
        self,
        linear: Linear,
        tensor_group: ProcessGroup,
        *,
        sharded: bool,
        gathers_rounded: bool = False,
        multiplier: float = 1.0,
        softcap: float | None = None,
        plain: Linear | None = None,
    ) -> None:
        self._linear = linear
        # The product without changes of some rows, if there are any.
        self._plain = linear if plain is None else plain
        self._group = tensor_group
        # The linear holds V / size rows, and parts are gathered; else every rank holds all.
        self._sharded = sharded
        # Parts are gathered in the type of `hidden`: half the bytes.
        self._gathers_rounded = gathers_rounded
        self._multiplier = multiplier
        self._softcap = softcap

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return each row's first largest logit's id, [n] int64, without changes; ranks send two numbers a row."""
        logits = self._plain.wide(hidden)
        values, ids = logits.max(dim=-1)
        if not self._sharded:
            return ids
        # Ids below 2**24 are exact in float32.
        local = torch.stack((values, (ids + self._group.rank * logits.shape[1]).float()), dim=-1)
        found = self._group.all_gather_last(local).view(len(hidden), self._group.size, 2)
        best = found[..., 0].argmax(dim=-1, keepdim=True)
        return found[..., 1].gather(1, best).squeeze(1).long()

    def __call__(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Compute logits, in `out` if given and the product can write there."""
        if not self._sharded:
            logits = wide_into(self._linear, hidden, out)
        elif self._gathers_rounded:
            logits = self._group.all_gather_last(self._linear(hidden), torch.float32, out)
        else:
            logits = self._group.all_gather_last(self._linear.wide(hidden), out=out)
        if self._multiplier != 1.0:
            logits.mul_(self._multiplier)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
