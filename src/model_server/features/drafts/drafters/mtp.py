"""Multi-token prediction: decoder layers behind the model's own, the first of which drafts."""

# In DeepSeek's files layer L has `enorm`, `hnorm` and `eh_proj`, which mix the next token's embedding with what the
# head reads, and `shared_head`.

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from model_server.attention.backend import AttentionBackend
from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.features.drafts.drafters.layer_drafter import LayerDrafter, begin_step
from model_server.layers.embedding import Embedding, Head, vocab_range
from model_server.layers.fused.choice import fused_for
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import AddNorm
from model_server.layers.rotary import Rotary
from model_server.memory.kv_cache import KvCache, KvShape
from model_server.models.decoder.blocks import Block, residual_norm
from model_server.models.decoder.build import load_block
from model_server.models.decoder.decoder import Decoder
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.spec import Spec
from model_server.models.decoder.vocabulary import head_over
from model_server.quantization.scheme import Scheme
from model_server.runner.runner import Kept, ModelInputs
from model_server.weights.matrix import Part
from model_server.weights.reader import WeightReader


@dataclass(frozen=True, slots=True)
class MtpLayer:
    """A `DraftLayer` on `base`."""

    base: Decoder
    embedding: Embedding | None
    embedding_norm: AddNorm
    states_norm: AddNorm
    # [embedding, states] side by side to [n, hidden].
    mix: Linear
    block: Block
    norm: AddNorm
    head: Head
    rotaries: tuple[Rotary, ...]
    backend: AttentionBackend

    @property
    def kv_shape(self) -> KvShape:
        return self.block.attention.kv_shape

    @property
    def max_positions(self) -> int | None:
        return self.base.max_positions

    def retains(self) -> Kept:
        return Kept(all_tokens=True)

    def kept(self, kept: Kept) -> Tensor:
        assert kept.final is not None
        return kept.final

    def states(self, kept: Tensor) -> Tensor:
        return kept

    def forward(self, inputs: ModelInputs, cache: KvCache) -> Tensor:
        """[n, hidden], behind the last norm."""
        embed = self.base.embed if self.embedding is None else self.embedding
        embedded = embed(inputs.input_ids)
        # As in training, where the first position has no token before it.
        embedded = embedded.masked_fill((inputs.positions == 0).unsqueeze(-1), 0)
        hidden = torch.zeros_like(embedded) if inputs.hidden is None else inputs.hidden
        step = begin_step(inputs, self.rotaries, self.backend, cache)
        mixed = self.mix(torch.cat((self.embedding_norm(embedded), self.states_norm(hidden)), dim=-1))
        return residual_norm(self.norm, *self.block(mixed, None, step))[1]

    def likeliest(self, hidden: Tensor) -> Tensor:
        return self.head.likeliest(hidden)

    def next_states(self, hidden: Tensor) -> Tensor:
        return hidden


def load_mtp(reader: WeightReader, spec: Spec, scheme: Scheme, base: Decoder, placement: Placement) -> LayerDrafter:
    """Load the first layer behind those of `base`."""
    prefix = f"{spec.names.layers}.{spec.num_layers}."
    size, group = spec.hidden_size, placement.ranks.tensor
    loader = Loader(
        reader, placement.device, group, spec.norm, spec.norm_eps, spec.norm_offset, spec.norm_affine,
        fused_for(placement.device, placement.dtype), first_layer=spec.num_layers, scheme=scheme,
        batch_invariant=placement.batch_invariant,
    )  # fmt: skip
    if not loader.holds(prefix + "eh_proj"):
        raise StartupError(f"the model has no layer for multi-token prediction (no {prefix}eh_proj): leave it out")
    backend = base.traits.attention
    assert backend is not None
    assert base.output is not None and base.output.head is not None
    own_head = prefix + "shared_head.head"
    layer = MtpLayer(
        base=base,
        embedding=_own_embedding(loader, spec, prefix + "embed_tokens"),
        embedding_norm=loader.norm(prefix + "enorm", size),
        states_norm=loader.norm(prefix + "hnorm", size),
        mix=loader.column_linear([Part(prefix + "eh_proj", ((0, size),), size)], 2 * size, as_stored=True),
        block=load_block(loader, _with_layer_behind(spec), spec.num_layers),
        norm=loader.norm(prefix + "shared_head.norm", size),
        head=base.output.head
        if _is_shared(loader, spec, own_head, spec.names.embedding if spec.tied_head else spec.names.head)
        else head_over(loader, own_head, spec.vocab_size, size),
        rotaries=tuple(Rotary(rope, placement.device) for rope in loader.ropes),
        backend=backend,
    )
    loader.linears.measure(group)
    return LayerDrafter(layer, loader.weight_bytes)


def _with_layer_behind(spec: Spec) -> Spec:
    """Add a layer of the last one's kind."""
    return replace(
        spec,
        num_layers=spec.num_layers + 1,
        ropes=(*spec.ropes, spec.ropes[-1]),
        windows=(*spec.windows, spec.windows[-1]),
        chunks=(*spec.chunks, *spec.chunks[-1:]),
        mlps=(*spec.mlps, *spec.mlps[-1:]),
    )


def _own_embedding(loader: Loader, spec: Spec, name: str) -> Embedding | None:
    """Load an embedding other than the model's, if any."""
    if _is_shared(loader, spec, name, spec.names.embedding):
        return None
    start, stop = vocab_range(spec.vocab_size, loader.tensor_group)
    return Embedding(loader.rows(name + ".weight", [(start, stop)], spec.hidden_size), start, loader.tensor_group)


def _is_shared(loader: Loader, spec: Spec, name: str, other: str) -> bool:
    """Whether a matrix is absent or a copy of the model's."""
    name, other = name + ".weight", other + ".weight"
    if not loader.has(name):
        return True
    if not loader.has(other) or loader.reader.shape(name) != loader.reader.shape(other):
        return False
    rows = [vocab_range(spec.vocab_size, loader.tensor_group)]
    return torch.equal(loader.reader.rows(name, rows), loader.reader.rows(other, rows))
