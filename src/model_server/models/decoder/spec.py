"""What a decoder is made of, as data: a family is a function from its config to a Spec.

What tensors say (a bias, a norm, a head) is not repeated here. Attention or MLP of another kind has a description that
loads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from model_server.layers.rotary import Rope
from model_server.layers.temperature import QueryTemperature
from model_server.models.decoder.loader import Loader, NormKind
from model_server.models.decoder.parts import AttentionPart, MixerPart, Mlp
from model_server.weights.products import ExpertPlace, Products


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How a checkpoint calls its tensors, without `.weight` and `.bias`; None: absent.

    Several names in `qkv` or `up` are separate matrices.
    """

    base: str = "model."  # public files may lack it
    # Parts of names, and what files that transformers wrote have instead, which undoes its renamings inexactly.
    spellings: tuple[tuple[str, str], ...] = ()
    embedding: str = "model.embed_tokens"
    embedding_projection: str | None = None
    positions: str | None = None
    token_types: str | None = None
    embedding_norm: str | None = None
    layers: str = "model.layers"  # what follows is relative to a layer
    attention_norm: str | None = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str | None = None  # the tensor itself, one number per query head
    output: str = "self_attn.o_proj"
    attention_post_norm: str | None = None  # on what attention gives, before it is added
    mlp_norm: str | None = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    activation: str = "mlp.act"  # AWQ's files may have scales of it where it is not gated
    down: str = "mlp.down_proj"
    mlp_post_norm: str | None = None
    scalar: str | None = None  # one number, the tensor itself, by which the stream is multiplied behind a layer
    # Of `Spec.layer_input_width`: the table, what is made of the embedding, its norm.
    layer_inputs: str | None = None
    layer_inputs_projection: str | None = None
    layer_inputs_norm: str | None = None
    norm: str | None = "model.norm"
    output_projection: str | None = None
    head: str = "lm_head"

    @property
    def inputs(self) -> frozenset[str]:
        """Return what only the first stage reads."""
        found = (
            self.embedding, self.embedding_projection, self.positions, self.embedding_norm, self.layer_inputs,
            self.layer_inputs_projection, self.layer_inputs_norm,
        )  # fmt: skip
        return frozenset(name for name in found if name is not None)


class AttentionSpec(Protocol):
    """An attention of another kind than Spec's fields describe."""

    def load(self, loader: Loader, spec: Spec, index: int) -> AttentionPart:
        """Load this rank's part of layer `index`."""

    def products(self, spec: Spec) -> Products:
        """List the products, relative to the layer."""

    def cached(self, spec: Spec) -> tuple[int, int, int]:
        """Return what is cached over all ranks: KV heads, width of a key, of a value."""


class MixerSpec(Protocol):
    """What a layer has instead of attention, or beside it."""

    @property
    def has_attention(self) -> bool:
        """Whether keys and values of heads are cached, too."""

    def load(self, loader: Loader, spec: Spec, index: int) -> MixerPart:
        """This rank's part of layer `index`."""

    def products(self, spec: Spec) -> Products:
        """List the products, relative to the layer."""


class MlpSpec(Protocol):
    """An MLP of another kind than Spec's fields describe."""

    def load(self, loader: Loader, spec: Spec, index: int) -> Mlp:
        """Load this rank's part of layer `index`."""

    def products(self, spec: Spec) -> Products:
        """List the products, relative to the layer."""

    def places(self, spec: Spec) -> Mapping[str, ExpertPlace]:
        """Place the tensors and parameters that hold experts, relative to the layer."""


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """What a layer has instead of Spec's fields of these names."""

    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    values_of_keys: bool = False  # values are keys before their norm and rotation, and have no matrix


@dataclass(frozen=True, slots=True)
class StreamFactors:
    """Factors of a "normed" block, on what a norm gives and on what is added to it."""

    attention: tuple[float, float]
    mlp: tuple[float, float]


# How a block adds its attention and its MLP to the residual stream:
# sequential: x += attention(norm(x)); x += mlp(norm(x));   parallel: x += attention(norm(x)) + mlp(norm(x));
# post: x = norm(x + attention(x)); x = norm(x + mlp(x));   single: x += attention(norm(x)) or x += mlp(norm(x)), where
# the other is `Nothing`;   normed: x = a norm(x) + b attention(norm(x)); x = c norm(x) + d mlp(norm(x)), by `factors`
BlockKind = Literal["sequential", "parallel", "post", "single", "normed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A decoder; the defaults are Llama's."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    max_positions: int | None  # None: unbounded
    names: Names = Names()
    left_over: tuple[str, ...] = ()  # patterns of tensors that files of the family hold, and that it does not need
    transposed: bool = False  # matrices of the blocks are stored [in, out]

    bidirectional: bool = False  # a token sees those behind it too: all of its text, or as far as the window reaches
    has_head: bool = True  # False: hidden states are the result

    block: BlockKind = "sequential"
    first_norm: bool = True  # False: the attention of layer 0 reads the embeddings as they are
    norm: NormKind = "rms"
    norm_eps: float
    norm_offset: float = 0.0  # added to the stored weight of every norm
    norm_affine: bool = True  # False: layer norms without tensors
    residual_multiplier: float = 1.0  # on what attention or MLP gives, before it is added
    factors: tuple[StreamFactors, ...] = ()  # per layer, of "normed" blocks alone
    wide_stream: bool = False  # the residual stream is float32 whatever the model's type; of "single" blocks alone

    embedding_size: int | None = None  # None: hidden_size
    embedding_multiplier: float = 1.0
    blank_ids: tuple[int, ...] = ()  # ids that are embedded as `blank_id`
    blank_id: int = 0
    position_offset: int = 0
    tied_head: bool  # the head is the embedding, unless the file holds another one
    normalized_head: bool = False  # its rows have length 1
    head_bias: bool = False  # False: one of zeros at most, as writers of quantized weights add
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None

    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Two qkv matrices: q, and k and v stacked. A single one: all query heads, all key heads, all value heads; or for
    # each key head: the query heads that read it, itself, its value head.
    packing: Literal["stacked", "grouped"] = "stacked"
    sizes: tuple[LayerSizes, ...] = ()  # per layer; empty: the fields above and `intermediate_size`
    # Per layer: the layer before it whose keys and values it reads; None, and everywhere if empty: its own.
    kv_from: tuple[int | None, ...] = ()
    value_norm: bool = False  # values have mean square 1
    qkv_clip: float | None = None  # bound on the absolute values of q, k and v
    scale: float  # of the attention scores
    # Rows of q hold for each head the query, then a gate: what the head gives is multiplied by its sigmoid.
    gated_attention: bool = False
    temperature: QueryTemperature | None = None  # of all layers
    scale_by_inverse_layer: bool = False  # layer i divides it by i + 1
    softcap: float | None = None
    ropes: tuple[Rope | None, ...]  # per layer; None: no rotation
    rope_pairs_adjacent: bool = False  # a stored head rotates (x0, x1), (x2, x3), ... instead of (x_i, x_(i + n/2))
    windows: tuple[int | None, ...]  # per layer: how many positions a token sees, itself included; None: all
    chunks: tuple[int | None, ...] = ()  # per layer: see `AttentionLayer`; empty: none
    alibi: tuple[float, ...] | None = None  # slope of every query head
    alibi_bfloat16_scale: float | None = None  # see `attention.backend.Alibi`
    attention: AttentionSpec | None = None  # instead of the fields since num_heads
    mixers: tuple[MixerSpec | None, ...] = ()  # per layer; None, and everywhere if empty: attention
    mixer_names: Names | None = None  # of the layers with a mixer; None: `names`

    activation: str
    gated: bool = True
    up_before_gate: bool = False  # in a matrix that holds both
    mlps: tuple[MlpSpec | None, ...] = ()  # per layer; None, and everywhere if empty: the MLP of the fields above
    # Each layer ends with what it makes of a vector of each token, of this width; None: it does not.
    layer_input_width: int | None = None
    layer_input_vocab_size: int = 0

    def mixer(self, index: int) -> MixerSpec | None:
        """Return what layer `index` has instead of attention, if anything."""
        return self.mixers[index] if self.mixers else None

    def owner(self, index: int) -> int:
        """Return the layer whose keys and values layer `index` reads."""
        found = self.kv_from[index] if self.kv_from else None
        return index if found is None else found

    def of_layer(self, index: int) -> Spec:
        """Return the spec with the sizes and names of layer `index`."""
        if self.mixer_names is not None and self.mixer(index) is not None:
            return replace(self, names=self.mixer_names)
        if not self.sizes:
            return self
        own = self.sizes[index]
        query, key, value = self.names.qkv
        return replace(
            self,
            num_kv_heads=own.num_kv_heads,
            head_dim=own.head_dim,
            intermediate_size=own.intermediate_size,
            names=replace(self.names, qkv=(query, key, key if own.values_of_keys else value)),
        )
