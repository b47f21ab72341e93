"""Quantized experts in a transformers model: our module replaces that of all experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from model_server.distributed.placement import Placement
from model_server.errors import StartupError
from model_server.layers.experts.choice import make_experts
from model_server.layers.experts.experts import Experts, ExpertWeights
from model_server.layers.linear.factory import LinearFactory
from model_server.quantization.scheme import Scheme
from model_server.weights.leftover import natural_order
from model_server.weights.library_names import Place
from model_server.weights.matrix import MatrixSlice, Part
from model_server.weights.reader import SafetensorsReader

UP, DOWN = "gate_up_proj", "down_proj"
"""What transformers calls the parameters of all experts."""

# What a class of transformers says of its layout, where it is the one that is served.
_LAYOUT = {"is_concatenated": True, "is_transposed": False, "has_bias": False, "has_gate": True}


class QuantizedExperts(nn.Module):
    """A layer's experts by our products."""

    def __init__(self, experts: Experts, placement: Placement) -> None:
        super().__init__()
        self._experts = experts
        self._dtype = placement.dtype

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum the chosen experts [n, top_k] of hidden [n, hidden] by weights [n, top_k]."""
        return self._experts(hidden.to(self._dtype), weights.float(), chosen.long()).to(hidden.dtype)


class AbsentExperts(nn.Module):
    """Stands for a layer's experts until their matrices are read, with nothing to load."""

    def __init__(self, name: str, experts: nn.Module, parts: dict[str, list[list[str]]]) -> None:
        """Take the stored modules of each parameter and expert, in order.

        Raises:
            StartupError: The layout is not served.
        """
        super().__init__()
        up, down = (parts.get(parameter, []) for parameter in (UP, DOWN))
        of_other_layout = [field for field, value in _LAYOUT.items() if getattr(experts, field, None) is not value]
        if of_other_layout or getattr(experts, "has_post_expert_norm", False) or len(up) != len(down):
            raise StartupError(f"the quantized experts of {name} have a layout that is not served: give plain weights")
        (self.count, self.width, self.hidden), shape = getattr(experts, UP).shape, getattr(experts, DOWN).shape
        if shape != (self.count, self.hidden, self.width // 2) or len(up) != self.count:
            raise StartupError(f"the files hold {len(up)} experts for {name}; the config asks for {self.count}")
        self._parts = list(zip(up, down, strict=True))
        experts.register_parameter(UP, None)
        experts.register_parameter(DOWN, None)
        self._gate: Any = experts._apply_gate
        self._is_silu = isinstance(getattr(experts, "act_fn", None), nn.SiLU) and _has_plain_gate(experts)

    def read(
        self, reader: SafetensorsReader, scheme: Scheme, factory: LinearFactory, placement: Placement
    ) -> QuantizedExperts:
        weights = (self._expert(reader, scheme, *parts) for parts in self._parts)
        experts = make_experts(weights, self.count, self._gate, factory, silu=self._is_silu)
        return QuantizedExperts(experts, placement)

    def _expert(self, reader: SafetensorsReader, scheme: Scheme, up: list[str], down: list[str]) -> ExpertWeights:
        rows = self.width // len(up)
        inner = self.width // 2
        matrix = MatrixSlice(
            parts=tuple(Part(name, ((0, rows),), rows) for name in up),
            columns=(0, self.hidden),
            num_columns=self.hidden,
        )
        (name,) = down
        part = Part(name, ((0, self.hidden),), self.hidden)
        return ExpertWeights(
            scheme.read(reader, matrix),
            scheme.read(reader, MatrixSlice(parts=(part,), columns=(0, inner), num_columns=inner)),
        )


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Stored matrices of one parameter, by module names."""

    places: dict[str, Place]

    def of_each(self) -> list[list[str]] | None:
        """Return each expert's stored modules; None if they are not whole experts in turn."""
        conversion = next(iter(self.places.values())).conversion
        operations = [type(one).__name__ for one in conversion.operations]
        if operations not in (["MergeModulelist"], ["MergeModulelist", "Concatenate"]):
            return None
        by_source = {source: [] for source in conversion.source_patterns}  # type: dict[str, list[str]]
        for module, place in self.places.items():
            by_source[place.source or ""].append(module)
        lists = [sorted(modules, key=natural_order) for modules in by_source.values()]
        if len({len(modules) for modules in lists}) != 1:
            return None
        return [list(of_one) for of_one in zip(*lists, strict=True)]


def _has_plain_gate(experts: nn.Module) -> bool:
    """Whether the activated gate multiplies the rest, and no more."""
    from transformers.integrations import moe

    return type(experts)._apply_gate is moe._default_apply_gate  # type: ignore[attr-defined]
