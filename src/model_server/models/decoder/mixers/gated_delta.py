"""Gated delta nets (Qwen 3 Next, Qwen 3.5): each head reads and corrects a state of the tokens before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from model_server.errors import StartupError
from model_server.layers.linear.linear import Linear
from model_server.memory.kv_cache import KvShape
from model_server.models.config import ModelConfig
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import Step
from model_server.models.decoder.spec import Spec
from model_server.recurrence.choice import DeltaNet, delta_net
from model_server.recurrence.delta_net import DeltaWeights
from model_server.recurrence.states import StateShape
from model_server.weights.matrix import Part
from model_server.weights.products import Products
from model_server.weights.reader import Range

# "kinds": a matrix each of queries, keys and values, of gates, of strengths, of decays; "heads": one with each key
# head's query, key, value heads and gates, and one with its strengths and decays; "heads of strengths": only this one.
# "apart": a matrix for each kind of row, under other names.
Packing = Literal["kinds", "heads", "heads of strengths", "apart"]


@dataclass(frozen=True, slots=True)
class GatedDelta:
    """The delta rule of this rank's heads, a `MixerPart`."""

    project: Linear  # rows: queries, keys, values, gates of the output, then a strength and a decay for each value head
    output: Linear
    index: int  # of the layer among this rank's
    net: DeltaNet
    state_shape: StateShape

    @property
    def kv_shape(self) -> KvShape:
        return KvShape(0, 0, 0)

    def __call__(self, hidden: Tensor, step: Step) -> Tensor:
        """Return [num_tokens, value heads * value_dim] of [num_tokens, hidden], before the output product."""
        assert step.recurrent is not None and step.states is not None, "the decoder knows that it has such layers"
        return step.recurrent(self.net, self.project(hidden), step.states.layer(self.index))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSpec:
    """A `MixerSpec`, with names relative to the layer."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    # Tokens that a convolution reads, its own included.
    width: int
    packing: Packing = "kinds"
    most_strength: float = 1.0
    # Of the norm of the outputs; None: the model's.
    eps: float | None = None
    prefix: str = "linear_attn."

    @property
    def repeats(self) -> int:
        """Value heads that read one key head."""
        return self.value_heads // self.key_heads

    @property
    def has_attention(self) -> bool:
        return False

    def check(self, config: ModelConfig) -> None:
        """Refuse sizes that do not fit each other, by the names that configs have for them."""
        if self.value_heads % self.key_heads != 0:
            raise StartupError(
                f"config.json: `linear_num_value_heads` ({self.value_heads}) is not a multiple of "
                f"`linear_num_key_heads` ({self.key_heads})"
            )
        if self.width < 2:
            raise StartupError("config.json: `linear_conv_kernel_dim` must be at least 2, got 1")
        if config.text("hidden_act", "silu") not in ("silu", "swish"):
            raise StartupError(f"config.json: `hidden_act` is served for {config.model_type} as 'silu' only")

    def load(self, loader: Loader, spec: Spec, index: int) -> GatedDelta:
        prefix = f"{spec.names.layers}.{index}.{self.prefix}"
        heads = loader.share(self.key_heads)
        values = heads[0] * self.repeats, heads[1] * self.repeats
        channels = self._channels(heads)
        size = self.value_heads
        norm, output = ("o_norm", "o_proj") if self.packing == "apart" else ("norm", "out_proj")
        weights = DeltaWeights(
            key_heads=heads[1] - heads[0],
            repeats=self.repeats,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            convolution=loader.depthwise(self._convolutions(prefix), channels, self._num_channels, self.width),
            rate=-loader.vector(prefix + "A_log", [values], size, torch.float32).exp(),
            bias=loader.vector(prefix + "dt_bias", [values], size, torch.float32),
            norm=loader.vector(f"{prefix}{norm}.weight", [(0, self.value_dim)], self.value_dim, torch.float32),
            eps=spec.norm_eps if self.eps is None else self.eps,
            most_strength=self.most_strength,
        )
        return GatedDelta(
            project=loader.column_linear(self._parts(prefix, heads), spec.hidden_size),
            output=loader.row_linear(
                prefix + output, (values[0] * self.value_dim, values[1] * self.value_dim), spec.hidden_size
            ),
            index=index - loader.first_layer,
            net=delta_net(weights, loader.device, loader.reader.dtype),
            state_shape=weights.state_shape(loader.reader.dtype),
        )

    def _convolutions(self, prefix: str) -> list[str]:
        kinds = [f"{kind}_" for kind in "qkv"] if self.packing == "apart" else [""]
        return [f"{prefix}{kind}conv1d.weight" for kind in kinds]

    @property
    def _num_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def _channels(self, heads: Range) -> tuple[Range, Range, Range]:
        """Return these key heads' queries, keys and values."""
        keys = self.key_heads * self.key_dim
        first, stop = heads[0] * self.key_dim, heads[1] * self.key_dim
        each = self.repeats * self.value_dim
        return (first, stop), (keys + first, keys + stop), (2 * keys + heads[0] * each, 2 * keys + heads[1] * each)

    def _parts(self, prefix: str, heads: Range) -> list[Part]:
        each = self.repeats * self.value_dim
        values = heads[0] * each, heads[1] * each
        ones = heads[0] * self.repeats, heads[1] * self.repeats

        def part(name: str, sizes: tuple[int, ...], number: int) -> Part:
            """Return each key head's part of that number."""
            whole, before = sum(sizes), sum(sizes[:number])
            firsts = (head * whole + before for head in range(*heads))
            return Part(prefix + name, tuple((f, f + sizes[number]) for f in firsts), self.key_heads * whole)

        if self.packing == "apart":
            keys = heads[0] * self.key_dim, heads[1] * self.key_dim
            rows = {"q": keys, "k": keys, "v": values, "g": values, "b": ones, "a": ones}
            return [Part(f"{prefix}{one}_proj", (cut,), self._rows[one]) for one, cut in rows.items()]
        if self.packing == "heads":
            sizes = self.key_dim, self.key_dim, each, each
            parts = [part("in_proj_qkvz", sizes, number) for number in range(4)]
        else:
            parts = [
                Part(prefix + "in_proj_qkv", self._channels(heads), self._num_channels),
                Part(prefix + "in_proj_z", (values,), self.value_heads * self.value_dim),
            ]
        if self.packing == "kinds":
            return [*parts, *(Part(prefix + f"in_proj_{one}", (ones,), self.value_heads) for one in "ba")]
        return [*parts, *(part("in_proj_ba", (self.repeats, self.repeats), number) for number in range(2))]

    @property
    def _rows(self) -> dict[str, int]:
        """Return the rows of matrices that are apart."""
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return {"q": keys, "k": keys, "v": values, "g": values, "b": self.value_heads, "a": self.value_heads}

    def products(self, spec: Spec) -> Products:
        values, size = self.value_heads * self.value_dim, spec.hidden_size
        if self.packing == "apart":
            apart = {f"{self.prefix}{one}_proj": (size, rows) for one, rows in self._rows.items()}
            return Products(linear={**apart, f"{self.prefix}o_proj": (values, size)})
        if self.packing == "heads":
            outputs = {"qkvz": self._num_channels + values}
        else:
            outputs = {"qkv": self._num_channels, "z": values}
        outputs |= dict.fromkeys("ba", self.value_heads) if self.packing == "kinds" else {"ba": 2 * self.value_heads}
        found = {f"{self.prefix}in_proj_{name}": (size, rows) for name, rows in outputs.items()}
        return Products(linear={**found, f"{self.prefix}out_proj": (values, size)})
