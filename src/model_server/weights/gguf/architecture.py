"""How an architecture of GGUF files differs from a family of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

_NONE: Mapping[str, Any] = MappingProxyType({})
RMS = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
OUTSIDE: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
PROJECTIONS: Mapping[str, str] = MappingProxyType({kind: f"{kind}_proj" for kind in ("gate", "up", "down")})
NUMBERED: Mapping[str, str] = MappingProxyType({"gate": "w1", "up": "w3", "down": "w2"})


def mlp(module: str, names: Mapping[str, str] = PROJECTIONS) -> dict[str, str]:
    return {f"ffn_{kind}": f"{module}.{name}" for kind, name in names.items()}


def experts(module: str, names: Mapping[str, str] = PROJECTIONS) -> dict[str, str]:
    # `{}`: the number of one.
    return {f"{name}_exps": found for name, found in mlp(f"{module}.{{}}", names).items()}


def shared_expert(module: str) -> dict[str, str]:
    return {f"{name}_shexp": found for name, found in mlp(module).items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """How llama.cpp's architecture differs from family `model_type`."""

    model_type: str
    # Modules outside of layers, and what precedes a layer's number.
    outside: Mapping[str, str] = field(default_factory=lambda: OUTSIDE)
    layers: str = "model.layers"
    # Modules of a layer.
    layer: Mapping[str, str]
    # Tensors of a layer other than weights and biases of modules.
    tensors: Mapping[str, str] = field(default_factory=lambda: _NONE)
    # Modules of each expert, whose tensors the file has as one; `{}` is its number.
    experts: Mapping[str, str] = field(default_factory=lambda: _NONE)
    # Files with experts and without are of the same architecture.
    may_be_dense: bool = False
    # Some layers attend, and have an MLP; else metadata has no sizes of theirs, or 0.
    attends: bool = True
    # Rows of q and k are in rotated pairs.
    adjacent: bool = False
    # Value heads of delta nets are in turn by key head, instead of those of one key head together.
    tiled: bool = False
    # What norms hold beside the family's numbers, but for some.
    added: float = 0.0
    not_added: tuple[str, ...] = ()
    # The field of the norms' epsilon, and its metadata.
    epsilon: tuple[str, str] = RMS
    # Further fields of config.json, by metadata; `present`: by the tensor that says so, with `{}` of each layer.
    fields: Mapping[str, str] = field(default_factory=lambda: _NONE)
    optional: Mapping[str, str] = field(default_factory=lambda: _NONE)
    present: Mapping[str, str] = field(default_factory=lambda: _NONE)
    # Returns fields that metadata says in other words, by the metadata without prefix and the fields that are known.
    derived: Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]] | None = None
    # What all its models have.
    fixed: Mapping[str, Any] = field(default_factory=lambda: _NONE)
    # Metadata that must have one of these values, where it is given.
    expected: Mapping[str, tuple[object, ...]] = field(default_factory=lambda: _NONE)
