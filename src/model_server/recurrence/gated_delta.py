"""The gated delta rule in plain torch, float32: a decaying state of each value head, corrected by each token.

With state S [key_dim, value_dim], query q, key k, value v, decay g <= 0, strength b: S <- e^g S; d = b (v - k S); S <-
S + k^T d; output q S.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Tokens whose corrections are found together, by one triangular system.
CHUNK = 64


class Tokens(NamedTuple):
    """What the rule reads of each token, float32."""

    query: Tensor  # [tokens, heads, key_dim]
    key: Tensor  # the same
    value: Tensor  # [tokens, heads, value_dim]
    decay: Tensor  # [tokens, heads]
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
    state.mul_(decay.exp()[..., None, None])
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
    for first in range(0, len(outputs), CHUNK):
        chunk = slice(first, first + CHUNK)
        outputs[chunk] = _chunk(tokens.part(chunk), state).transpose(0, 1)
    return outputs


def _chunk(tokens: Tokens, state: Tensor) -> Tensor:
    """Compute [heads, tokens, value_dim]; no e^(sum of decays) exceeds 1."""
    query, key, value, decay, strength = (t.transpose(0, 1) for t in tokens)
    total = decay.cumsum(-1)  # [heads, tokens]
    apart = total.unsqueeze(-1) - total.unsqueeze(-2)
    future = torch.ones(apart.shape[-2:], dtype=torch.bool, device=apart.device).triu(1)
    between = apart.masked_fill_(future, -torch.inf).exp_()  # [heads, tokens, tokens before]
    strength = strength.unsqueeze(-1)
    carried = total.exp().unsqueeze(-1)
    system = (key @ key.mT).mul_(between).mul_(strength).tril_(-1)
    wanted = (value - (key @ state).mul_(carried)).mul_(strength)
    delta = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    output = (query @ state).mul_(carried).baddbmm_((query @ key.mT).mul_(between), delta)
    last = total[:, -1:]
    rest = (last - total).exp_().unsqueeze(-1)
    state.mul_(last.exp().unsqueeze(-1)).baddbmm_((key * rest).mT, delta)
    return output
