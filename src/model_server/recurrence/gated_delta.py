"""The gated delta rule in plain torch, float32: a decaying state of each value head, corrected by each token.

With state S [key_dim, value_dim], query q, key k, value v, decay g <= 0, strength b: S <- e^g S; d = b (v - k S); S <-
S + k^T d; output q S. Kimi's rule has a decay for each number of a key: diag(e^g) S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Tokens whose corrections are found together, by one triangular system; fewer where each number of a key has a decay:
# every pair of tokens then has one for each.
CHUNK, CHUNK_BY_KEY = 64, 16


class Tokens(NamedTuple):
    """What the rule reads of each token, float32."""

    query: Tensor  # [tokens, heads, key_dim]
    key: Tensor  # the same
    value: Tensor  # [tokens, heads, value_dim]
    decay: Tensor  # [tokens, heads, 1 or key_dim]
    strength: Tensor  # [tokens, heads]

    def part(self, rows: slice) -> Tokens:
        return Tokens._make(t[rows] for t in self)

    def select(self, rows: Tensor) -> Tokens:
        return Tokens._make(t.index_select(0, rows) for t in self)


def step(tokens: Tokens, state: Tensor) -> Tensor:
    """Advance several sequences by a token.

    Args:
        state: [tokens, heads, key_dim, value_dim], overwritten.

    Returns:
        [tokens, heads, value_dim].
    """
    query, key, value, decay, strength = tokens
    state.mul_(decay.exp().unsqueeze(-1))
    known = (key.unsqueeze(-2) @ state).squeeze(-2)
    delta = (value - known).mul_(strength.unsqueeze(-1))
    state.addcmul_(key.unsqueeze(-1), delta.unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).squeeze(-2)


def sequence(tokens: Tokens, state: Tensor) -> Tensor:
    """Advance one sequence, in chunks.

    Args:
        state: [heads, key_dim, value_dim], overwritten.

    Returns:
        [tokens, heads, value_dim].
    """
    outputs = torch.empty_like(tokens.value)
    size = CHUNK if tokens.decay.shape[-1] == 1 else CHUNK_BY_KEY
    for first in range(0, len(outputs), size):
        chunk = slice(first, first + size)
        outputs[chunk] = _chunk(tokens.part(chunk), state).transpose(0, 1)
    return outputs


def _chunk(tokens: Tokens, state: Tensor) -> Tensor:
    """Compute [heads, tokens, value_dim]; no e^(sum of decays) exceeds 1."""
    query, key, value, decay, strength = (t.transpose(0, 1) for t in tokens)
    total = decay.cumsum(1)  # [heads, tokens, 1 or key_dim]
    since = total.exp()  # the start of the chunk
    strength = strength.unsqueeze(-1)
    keys, queries = _decayed_products(key, query, total)
    system = keys.mul_(strength).tril_(-1)
    wanted = (value - (key * since) @ state).mul_(strength)
    delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = ((query * since) @ state).baddbmm_(queries, delta)
    last = total[:, -1:]
    rest = (last - total).exp_()
    state.mul_(last.exp().mT).baddbmm_((key * rest).mT, delta)
    return output


def _decayed_products(key: Tensor, query: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return the products of keys, and of queries, with the keys up to them, decayed in between.

    Args:
        total: The sums of decays from the start of the chunk on, [heads, tokens, 1 or key_dim].

    Returns:
        Two of [heads, tokens, tokens].
    """
    apart = total.unsqueeze(2) - total.unsqueeze(1)  # [heads, tokens, tokens before, 1 or key_dim]
    future = torch.ones(apart.shape[1:3], dtype=torch.bool, device=apart.device).triu(1).unsqueeze(-1)
    between = apart.masked_fill_(future, -torch.inf).exp_()
    if total.shape[-1] == 1:
        between = between.squeeze(-1)
        return (key @ key.mT).mul_(between), (query @ key.mT).mul_(between)
    decayed = between.mul_(key.unsqueeze(1))
    keys, queries = (torch.einsum("hik,hijk->hij", one, decayed) for one in (key, query))
    return keys, queries
