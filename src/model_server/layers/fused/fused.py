"""Element-wise work between matrix products, as operators that a device may fuse.

`torch.TorchFused` is the reference; `choice.fused_for` chooses at loading.
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
    """What a row of queries, keys and values [num_heads + 2 * num_kv_heads, head_dim] holds."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Numbers at the front of query and key heads that rotate, pairs side by side.
    rotary_dim: int
    # Multiplies cached float8 keys when they are read, as `value_scale` values.
    key_scale: float = 1.0
    value_scale: float = 1.0


class Fused(Protocol):
    """The operators of a device; weights are prepared at loading."""

    def rms_norm(self, weight: Tensor, eps: float) -> AddNorm:
        """Make `layers.norm.RmsNorm` with weights [n], or [heads, n]."""

    def layer_norm(self, weight: Tensor | None, bias: Tensor | None, eps: float) -> AddNorm:
        """Make `layers.norm.LayerNorm`; weight and bias may be None."""

    def gated(self, name: str) -> Activation:
        """Make activation(gate) * up, from [n, 2 * m] (gate, then up) to [n, m]."""

    def clamped_swiglu(self, alpha: float, limit: float) -> Activation:
        """Make `layers.activation.clamped_swiglu`, from [n, 2 * m] to [n, m]."""

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
        """Norm and rotate queries and keys in place, and cache keys and values.

        Args:
            qkv: [n, (num_heads + 2 * num_kv_heads) * head_dim], last dimension contiguous.
            qk_norm: Over [n, num_heads + num_kv_heads, head_dim].
            rows: A layer's cache [num_slots, 2 * num_kv_heads * head_dim], of the type of qkv or float8.
            slots: [n] int64.
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
        """Finish keys and queries of latent attention, and cache the keys.

        Args:
            latent: [n, rank + dim], latents (normed by `norm`, which `rms_norm` made) and the rotating key.
            rotated: [n, heads, dim] of the queries, written rotated to `turned`, perhaps itself.
            rows: A layer's cache [num_slots, rank + dim], of latent's type or float8.
            slots: [n] int64.

        Returns:
            [n, rank + dim] as stored, in latent's type.
        """
