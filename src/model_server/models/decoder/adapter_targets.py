"""Which layers of a model take LoRA adapters, known from its Spec: before weights are read, and on no rank in
particular."""

from __future__ import annotations

from collections.abc import Iterator

from model_server.adapters.folder import Targets
from model_server.models.decoder.spec import Spec


def adapter_targets(spec: Spec) -> Targets:
    """The linear layers of attention and MLP, the embedding and the head; not experts, latent attention, or a head of
    unit rows."""
    found: dict[str, tuple[int, int]] = {}
    for index in range(spec.num_layers):
        prefix = f"{spec.names.layers}.{index}."
        if spec.attention is None:
            found.update((prefix + name, shape) for name, shape in _attention(spec))
        if not spec.mlps or spec.mlps[index] is None:
            found.update((prefix + name, shape) for name, shape in _mlp(spec))
    width = spec.embedding_size or spec.hidden_size
    if not spec.normalized_head:
        found[spec.names.head] = width, spec.vocab_size
    return Targets(
        linear=found,
        head="" if spec.normalized_head else spec.names.head,
        embedding=spec.names.embedding,
        table=(spec.vocab_size, width),
    )


def _attention(spec: Spec) -> Iterator[tuple[str, tuple[int, int]]]:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    outputs = {1: (queries + 2 * keys,), 2: (queries, 2 * keys), 3: (queries, keys, keys)}
    for name, size in zip(spec.names.qkv, outputs[len(spec.names.qkv)], strict=True):
        yield name, (spec.hidden_size, size)
    yield spec.names.output, (queries, spec.hidden_size)


def _mlp(spec: Spec) -> Iterator[tuple[str, tuple[int, int]]]:
    size = spec.intermediate_size
    packed = spec.gated and len(spec.names.up) == 1
    for name in spec.names.up:
        yield name, (spec.hidden_size, 2 * size if packed else size)
    yield spec.names.down, (size, spec.hidden_size)
