"""A vector of each token for each layer, beside the stream (Gemma 4); the first stage makes them for all."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from model_server.layers.activation import Activation, activation
from model_server.layers.embedding import Embedding, vocab_range
from model_server.layers.linear.linear import Linear
from model_server.layers.norm import Norm
from model_server.models.decoder.blocks import Block, Stream, residual_norm
from model_server.models.decoder.loader import Loader
from model_server.models.decoder.parts import AttentionPart, Mlp, Step
from model_server.models.decoder.spec import Spec
from model_server.weights.matrix import MatrixSlice, Part

GATE, OUTPUT, NORM = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
"""Modules of a layer."""


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """From ids and embeddings to the vectors of all layers."""

    table: Embedding  # rows: the vectors of all layers
    multiplier: Tensor  # on them
    projection: Linear  # of the embedding, to vectors of all layers
    norm: Norm  # of each of these
    width: int

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        """Return [n, layers, width] of ids [n], embedded as [n, hidden]."""
        own = self.table(ids).mul_(self.multiplier)
        made = self.projection(embedded).mul_(embedded.shape[1] ** -0.5)
        made = self.norm(made.view(len(ids), -1, self.width))
        return made.add_(own.view(made.shape)).mul_(2.0**-0.5)


def load_layer_inputs(loader: Loader, spec: Spec) -> LayerInputs | None:
    """Load them if the model has them; ranks divide the table by ids."""
    names, width = spec.names, spec.layer_input_width
    if width is None:
        return None
    assert names.layer_inputs is not None
    assert names.layer_inputs_projection is not None
    assert names.layer_inputs_norm is not None
    rows, total = spec.layer_input_vocab_size, spec.num_layers * width
    part = vocab_range(rows, loader.tensor_group)
    table = loader.decoded(
        MatrixSlice(parts=(Part(names.layer_inputs, (part,), rows),), columns=(0, total), num_columns=total)
    )
    return LayerInputs(
        table=Embedding(table, part[0], loader.tensor_group),
        # Of the weights' type, as transformers multiplies.
        multiplier=torch.tensor(width**0.5, dtype=table.dtype, device=loader.device),
        projection=loader.column_linear(
            [Part(names.layer_inputs_projection, ((0, total),), total)], spec.hidden_size, as_stored=True
        ),
        norm=loader.norm(names.layer_inputs_norm, width),
        width=width,
    )


@dataclass(frozen=True, slots=True)
class LayerInputGate:
    """norm(output(activation(gate(x)) * vector)), of whole matrices on every rank."""

    gate: Linear
    activation: Activation
    output: Linear
    norm: Norm

    def __call__(self, hidden: Tensor, vectors: Tensor) -> Tensor:
        return self.norm(self.output(self.activation(self.gate(hidden)).mul_(vectors)))


@dataclass(frozen=True, slots=True)
class ExtendedBlock:
    """A block, then what it makes of the tokens' vectors, then a factor on the stream."""

    inner: Block
    index: int  # of the layer, in its stage
    gate: LayerInputGate | None
    scalar: Tensor | None  # [1]

    @property
    def attention(self) -> AttentionPart:
        return self.inner.attention

    @property
    def mlp(self) -> Mlp:
        return self.inner.mlp

    def __call__(self, hidden: Tensor, added: Tensor | None, step: Step, kept_rows: Tensor | None = None) -> Stream:
        hidden, _ = residual_norm(None, *self.inner(hidden, added, step, kept_rows))
        if self.gate is not None:
            assert step.layer_inputs is not None, "the decoder has made them"
            vectors = step.layer_inputs[:, self.index]
            hidden = self.gate(hidden, vectors if kept_rows is None else vectors.index_select(0, kept_rows)).add_(
                hidden
            )
        return hidden if self.scalar is None else hidden * self.scalar, None


def extended(loader: Loader, spec: Spec, index: int, block: Block) -> Block:
    """Return `block`, layer `index`, with what follows it, if anything."""
    prefix = f"{spec.names.layers}.{index}."
    gate = scalar = None
    if spec.layer_input_width is not None:
        gate = LayerInputGate(
            gate=_whole(loader, prefix + GATE, spec.hidden_size, spec.layer_input_width),
            activation=activation(spec.activation),
            output=_whole(loader, prefix + OUTPUT, spec.layer_input_width, spec.hidden_size),
            norm=loader.norm(prefix + NORM, spec.hidden_size),
        )
    if spec.names.scalar is not None and loader.has(prefix + spec.names.scalar):
        scalar = loader.vector(prefix + spec.names.scalar, [(0, 1)], 1)
    if gate is None and scalar is None:
        return block
    return ExtendedBlock(block, index - loader.first_layer, gate, scalar)


def _whole(loader: Loader, name: str, inputs: int, outputs: int) -> Linear:
    return loader.column_linear([Part(name, ((0, outputs),), outputs)], inputs)
