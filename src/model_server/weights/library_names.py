"""Where transformers puts a checkpoint's tensors, by its private renaming functions, stable since 5.0."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from model_server.weights.leftover import layer_of, natural_order


@dataclass(frozen=True, slots=True)
class Place:
    """A stored tensor's parameter."""

    name: str
    # Makes it, perhaps of several; None: it is that tensor.
    conversion: Any = None
    # The pattern that it matches.
    source: str | None = None


class StoredNames:
    """A model's parameters by stored names."""

    def __init__(self, model: Any) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        mapping = get_model_conversion_mapping(model)
        self._renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        self._conversions = [one for one in mapping if isinstance(one, WeightConverter)]
        self._by_source = {source: one for one in self._conversions for source in one.source_patterns}
        self._prefix = model.base_model_prefix
        self._tensors = model.state_dict()
        self._lists = {
            name: len(one)
            for name, one in model.named_modules()
            if isinstance(one, nn.ModuleList) and not any(part.isdecimal() for part in name.split("."))
        }
        self.left_over: tuple[str, ...] = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())

    def place(self, stored: str) -> Place | None:
        """Return a tensor's place, if there is one."""
        name, source = self._renamed(stored)
        if name in self._tensors:
            return Place(name) if source is None else Place(name, self._by_source[source], source)
        return Place(stored) if stored in self._tensors else None

    def without_place(self, stored: Iterable[str]) -> list[str]:
        """List tensors without a place of their own."""
        found: list[str] = []
        taken: dict[str, str] = {}
        for name in sorted(stored, key=natural_order):
            place = self.place(name)
            if place is not None and place.conversion is None:
                other = taken.setdefault(place.name, name)
                if other != name:
                    found.append(other if name == place.name else name)
            elif place is None:
                found.append(name)
        return found

    def of_numbers(self, stored: Iterable[str]) -> list[str]:
        """List tensors whose place takes floating point numbers."""
        places = {name: place.name for name in stored if (place := self.place(name)) is not None}
        return [name for name, place in places.items() if self._tensors[place].is_floating_point()]

    def layer_beyond(self, stored: str) -> int | None:
        """Return a tensor's layer that the model lacks, if so."""
        name, _ = self._renamed(stored)
        for layers, count in self._lists.items():
            index = layer_of(name, (layers,))
            if index is not None and index >= count:
                return index
        return None

    def _renamed(self, stored: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        found: tuple[str, str | None] = rename_source_key(
            stored, self._renamings, self._conversions, self._prefix, self._tensors
        )
        return found
