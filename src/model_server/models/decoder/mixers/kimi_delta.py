"""Kimi's delta attention: a gated delta net with a decay for each number of a key; decays and gates by two products."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.layers.linear.linear import Linear
from model_server.memory.kv_cache import KvShape
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.recurrence.choice import DeltaNet, delta_net
from model_server.recurrence.delta_net import DeltaWeights
from model_server.recurrence.states import StateShape
from model_server.weights.matrix import Part
from model_server.weights.products import Products
from model_server.weights.reader import Range

_PREFIX = "self_attn."
# As transformers has them, in a module of their own.
_OTHER_NAMES = {f"{_PREFIX}forget_gate.{name}": _PREFIX + name for name in ("f_a_proj", "f_b_proj")}


@dataclass(frozen=True, slots=True)
class KimiDelta:
    """The delta rule of this rank's heads, a `MixerPart`."""

    project: Linear  # rows: queries, keys, values, a strength for each head, then what the next two read
    decays: Linear
    gates: Linear
    output: Linear
    index: int  # of the layer among this rank's
    net: DeltaNet
    state_shape: StateShape

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(0, 0, 0)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return [num_tokens, heads * head_dim] of [num_tokens, hidden], before the output product."""
        assert step.recurrent is not None and step.states is not None, "the decoder knows that it has such layers"
        heads, _, dim = self.state_shape.state
        both = [dim, dim]
        channels, strengths, of_decays, of_gates = torch.split(self.project(hidden), [3 * heads * dim, heads, *both], 1)
        gates, decays = self.gates(of_gates.contiguous()), self.decays(of_decays.contiguous())
        projected = torch.cat((channels, gates, strengths, decays), dim=1)
        return step.recurrent(self.net, projected, step.states.layer(self.index))


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDeltaSpec:
    """A `MixerSpec`; keys and values are of `head_dim` numbers."""

    heads: int
    head_dim: int
    # Tokens that a convolution reads, its own included.
    width: int

    @property
    def has_attention(self) -> bool:
        return False

    @property
    def values(self) -> int:
        """Numbers of a token's queries, keys or values, of all ranks."""
        return self.heads * self.head_dim

    def load(self, loader: Loader, spec: Spec, index: int) -> KimiDelta:
        prefix = f"{spec.names.layers}.{index}.{_PREFIX}"
        heads = loader.share(self.heads)
        values = heads[0] * self.head_dim, heads[1] * self.head_dim
        rate = -loader.numbers(prefix + "A_log", heads, self.heads).exp()
        channels = [(i * self.values + values[0], i * self.values + values[1]) for i in range(3)]
        convolutions = [f"{prefix}{kind}_conv1d.weight" for kind in "qkv"]
        weights = DeltaWeights(
            key_heads=heads[1] - heads[0],
            repeats=1,
            key_dim=self.head_dim,
            value_dim=self.head_dim,
            convolution=loader.depthwise(convolutions, channels, 3 * self.values, self.width),
            rate=rate.repeat_interleave(self.head_dim),
            bias=loader.vector(prefix + "dt_bias", [values], self.values, torch.float32),
            norm=loader.vector(prefix + "o_norm.weight", [(0, self.head_dim)], self.head_dim, torch.float32),
            eps=spec.norm_eps,
            gating="sigmoid",
        )

        def widened(name: str) -> Linear:
            """Load a product that reads `head_dim` numbers."""
            return loader.column_linear([Part(prefix + name, (values,), self.values)], self.head_dim)

        return KimiDelta(
            project=loader.column_linear(self._parts(prefix, heads, values), spec.hidden_size),
            decays=widened("f_b_proj"),
            gates=widened("g_b_proj"),
            output=loader.row_linear(prefix + "o_proj", values, spec.hidden_size),
            index=index - loader.first_layer,
            net=delta_net(weights, loader.device, loader.reader.dtype),
            state_shape=weights.state_shape(loader.reader.dtype),
        )

    def _parts(self, prefix: str, heads: Range, values: Range) -> list[Part]:
        """List what reads hidden states; every rank has all of what the next products read."""
        return [
            *(Part(f"{prefix}{name}_proj", (values,), self.values) for name in "qkv"),
            Part(prefix + "b_proj", (heads,), self.heads),
            *(Part(f"{prefix}{name}_a_proj", ((0, self.head_dim),), self.head_dim) for name in "fg"),
        ]

    def products(self, spec: Spec) -> Products:
        size, dim, values = spec.hidden_size, self.head_dim, self.values
        shapes = dict.fromkeys(("q_proj", "k_proj", "v_proj"), (size, values))
        shapes |= {"b_proj": (size, self.heads), "o_proj": (values, size)}
        shapes |= dict.fromkeys(("f_a_proj", "g_a_proj"), (size, dim)) | dict.fromkeys(
            ("f_b_proj", "g_b_proj"), (dim, values)
        )
        linear = {_PREFIX + name: shape for name, shape in shapes.items()}
        return Products(linear=linear, other_names=_OTHER_NAMES)
