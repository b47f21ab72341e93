"""Element-wise work between two matrix products, as operators that a device may fuse into one kernel each.

What they give is said by `torch.TorchFused`, the arithmetic in plain torch that every other implementation is tested
against. `choice.fused_for` chooses the implementation when a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from model_server.layers.activation import Activation
from model_server.layers.norm import AddNorm, Norm
from model_server.layers.rotary import Rotations
from model_server.layers.routing import Choice, Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """What a row of queries, keys and values holds, [num_heads + 2 * num_kv_heads, head_dim], and how it is stored.

    rotary_dim: how many numbers at the front of a query or key head rotate, pairs side by side; 0: none.
    key_scale, value_scale: what the numbers of a cache of float8 are multiplied by when they are read.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    key_scale: float = 1.0
    value_scale: float = 1.0


class Fused(Protocol):
    """The operators of a device. Weights and constants of what is made here are prepared once, at loading."""

    def rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        """`layers.norm.RmsNorm`. weight: [n], or [heads, n] for one weight per head, of any floating type."""

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> AddNorm:
        """`layers.norm.LayerNorm`. weight and bias as for `rms_norm`, or None."""

    def gated(self, name: str) -> Activation:
        """[n, 2 * m] (gate, then up) -> [n, m]: activation(gate) * up. Raises StartupError for an unknown name."""

    def clamped_swiglu(self, alpha: float, limit: float) -> Activation:
        """`layers.activation.clamped_swiglu`: [n, 2 * m] (gate, then up) -> [n, m]."""

    def route(self, routing: Routing, correction: Tensor | None) -> Choice:
        """`layers.routing.choose`, for logits of any floating type."""

    def rotate_write(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        qk_norm: Norm | None,
        rotations: Rotations | None,
        rows: Tensor,
        slots: Tensor,
    ) -> None:
        """Norm and rotate queries and keys in place, and store keys and values in the cache.

        qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], only its last dimension need be contiguous; qk_norm: over
        [n, num_heads + num_kv_heads, head_dim]; rotations: of the n tokens, None without any; rows: a layer's part of
        the cache [num_slots, 2 * num_kv_heads * head_dim], in the type of qkv or in float8; slots: [n] int64.
        """

    def latent_write(
        self,
        latent: Tensor,
        norm: Norm,
        rotated: Tensor,
        turned: Tensor,
        rotations: Rotations,
        rows: Tensor,
        slots: Tensor,
    ) -> Tensor:
        """Finish the keys and queries of latent attention, and store the keys in the cache.

        latent: [n, rank + dim], each token's latent and the key that rotates; the latent is normed by `norm`, which
        `rms_norm` made. rotated: [n, heads, dim], what of the queries rotates, written rotated to `turned`, of the same
        shape, which may be `rotated` itself. rows: a layer's part of the cache [num_slots, rank + dim], in the type of
        latent or in float8; slots: [n] int64. Only the last dimension of latent, rotated and turned must be
        contiguous. Returns what is stored, [n, rank + dim], in the type of latent.
        """
