"""The products of a model, by the Spec alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from model_server.models.decoder.layer_inputs import GATE, OUTPUT
from model_server.models.decoder.spec import Spec
from model_server.weights.products import ExpertParameter, ExpertPlace, Products


def model_products(spec: Spec) -> Products:
    """List linear layers of attention and MLP, experts, routers, embedding and head, except a head of unit rows."""
    found: dict[str, tuple[int, int]] = {}
    experts: dict[str, tuple[ExpertParameter, ...]] = {}
    of_experts: set[str] = set()
    other_names: dict[str, str] = {}
    for index in range(spec.num_layers):
        layer = spec.of_layer(index)
        prefix = f"{layer.names.layers}.{index}."
        mixer = layer.mixer(index) or layer.attention
        attention = heads_products(layer, index) if mixer is None else mixer.products(layer)
        found.update((prefix + name, shape) for name, shape in _extended(layer))
        found.update((prefix + name, shape) for name, shape in attention.linear.items())
        other_names.update((prefix + other, prefix + name) for other, name in attention.other_names.items())
        mlp = layer.mlps[index] if layer.mlps else None
        if mlp is None:
            found.update((prefix + name, shape) for name, shape in _mlp(layer))
            continue
        targets = mlp.products(layer)
        found.update((prefix + name, shape) for name, shape in targets.linear.items())
        experts.update((prefix + name, parameters) for name, parameters in targets.experts.items())
        of_experts.update(prefix + name for name in targets.of_experts)
        other_names.update((prefix + other, prefix + name) for other, name in targets.other_names.items())
    if spec.layer_input_width is not None and spec.names.layer_inputs_projection is not None:
        found[spec.names.layer_inputs_projection] = spec.hidden_size, spec.num_layers * spec.layer_input_width
    width = spec.embedding_size or spec.hidden_size
    if not spec.normalized_head:
        found[spec.names.head] = width, spec.vocab_size
    return Products(
        linear=found,
        head="" if spec.normalized_head else spec.names.head,
        embedding=spec.names.embedding,
        table=(spec.vocab_size, width),
        experts=experts,
        of_experts=frozenset(of_experts),
        other_names=other_names,
        base=spec.names.base,
    )


def expert_places(spec: Spec) -> dict[str, ExpertPlace]:
    """Place the tensors that hold experts, by name."""
    found: dict[str, ExpertPlace] = {}
    for index, mlp in enumerate(spec.mlps):
        prefix = f"{spec.names.layers}.{index}."
        places = {} if mlp is None else mlp.places(spec)
        found.update((prefix + name, replace(one, parameter=prefix + one.parameter)) for name, one in places.items())
    return found


def heads_products(spec: Spec, index: int | None = None) -> Products:
    """List attention layers with keys and values per head, by names relative to the layer.

    Args:
        index: Of the layer; None: any that has keys of its own.
    """
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gates = queries if spec.gated_attention else 0
    if index is not None and spec.owner(index) != index:
        return Products(
            linear={
                spec.names.qkv[0]: (spec.hidden_size, queries),
                spec.names.output: (queries, spec.hidden_size),
            }
        )
    outputs = {1: (queries + 2 * keys,), 2: (queries, 2 * keys), 3: (queries + gates, keys, keys)}
    found = {
        name: (spec.hidden_size, size) for name, size in zip(spec.names.qkv, outputs[len(spec.names.qkv)], strict=True)
    }
    return Products(linear={**found, spec.names.output: (queries, spec.hidden_size)})


def _mlp(spec: Spec) -> Iterator[tuple[str, tuple[int, int]]]:
    size = spec.intermediate_size
    packed = spec.gated and len(spec.names.up) == 1
    for name in spec.names.up:
        yield name, (spec.hidden_size, 2 * size if packed else size)
    yield spec.names.down, (size, spec.hidden_size)


def _extended(spec: Spec) -> Iterator[tuple[str, tuple[int, int]]]:
    """List what follows the MLP."""
    if spec.layer_input_width is not None:
        yield GATE, (spec.hidden_size, spec.layer_input_width)
        yield OUTPUT, (spec.layer_input_width, spec.hidden_size)
