"""What a decoder is made of, as data. A family is a function from its config to a Spec; one decoder interprets it.

What the checkpoint itself tells is not repeated here: a bias, a per-head norm or an own head is there if its tensor is.
"""

from __future__ import annotations

from dataclasses import dataclass

from model_server.layers.rotary import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A pre-norm decoder of RMS norms, rotary grouped-query attention and gated MLPs."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    activation: str
    rope: Rope
    windows: tuple[int | None, ...]  # per layer: how many positions a token sees, itself included; None: all
    scale: float  # of the attention scores
    tied_head: bool  # the head is the embedding even if the file holds another
    max_positions: int
