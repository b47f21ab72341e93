"""config.json as typed fields with transformers' defaults. Never trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from model_server.errors import StartupError
from model_server.layers.rotary import Rope

# No count in a real model comes near; a larger one would be asked for as memory.
MAX_COUNT = 2**31

# Types whose layers of cross attention read images; transformers computes them (`models.hf.crossing`).
CROSSING = frozenset(("idefics", "mllama"))

# Kinds of rotation that depend on the length of the texts before they were scaled.
_WITH_ORIGINAL = ("llama3", "longrope", "su", "yarn")
_OF_PHIMOE = ("short_mscale", "long_mscale")


_SAME: Mapping[str, str] = {}


class ModelConfig:
    """Fields of a config.json; errors name the field, as the file has it."""

    def __init__(self, fields: Mapping[str, Any], names: Mapping[str, str] = _SAME) -> None:
        """Take the fields, and the file's `names` of those that are called otherwise here."""
        self._fields = fields
        self._names = names

    @property
    def model_type(self) -> str:
        value = self._fields.get("model_type")
        if not isinstance(value, str):
            raise StartupError("config.json names no `model_type`")
        return value

    def named(self, name: str) -> str:
        """Return the file's name of a field."""
        return self._names.get(name, name)

    def has(self, name: str) -> bool:
        """Whether the file has `name`, even as null."""
        return name in self._fields

    def get(self, name: str) -> Any:
        return self._fields.get(name)

    def count(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < MAX_COUNT:
            raise StartupError(f"config.json: `{self.named(name)}` must be a positive integer, got {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A positive finite number."""
        value = self._fields.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise StartupError(f"config.json: `{self.named(name)}` must be a positive number, got {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise StartupError(f"config.json: `{self.named(name)}` must be true or false, got {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._fields.get(name)
        value = default if value is None else value
        if not isinstance(value, str):
            raise StartupError(f"config.json: `{self.named(name)}` must be a string, got {value!r}")
        return value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """Return a positive number; None for null, `default` if absent."""
        if name not in self._fields:
            return default
        return None if self._fields[name] is None else self.number(name, 1.0)

    def renamed(self, names: Mapping[str, str | tuple[str, ...]], **added: Any) -> ModelConfig:
        """Rename fields {ours: theirs, or several, the first wins}; `added` fill in for null or absent ones."""
        fields, files = dict(self._fields), dict(self._names)
        fields |= {name: value for name, value in added.items() if fields.get(name) is None}
        for ours, theirs in names.items():
            choices = (theirs,) if isinstance(theirs, str) else theirs
            given = next((name for name in choices if self._fields.get(name) is not None), None)
            if given is not None:
                fields[ours] = self._fields[given]
            if given is not None or fields.get(ours) is None:
                files[ours] = self.named(given or choices[0])
        return ModelConfig(fields, files)

    def replaced(self, **fields: Any) -> ModelConfig:
        """Replace fields, whatever the file says."""
        names = {ours: name for ours, name in self._names.items() if ours not in fields}
        return ModelConfig({**self._fields, **fields}, names)

    def without(self, *names: str) -> ModelConfig:
        """Drop fields that transformers does not read for this type."""
        return ModelConfig({name: value for name, value in self._fields.items() if name not in names}, self._names)

    def rope_block(self) -> Mapping[str, Any]:
        """Return `rope_scaling`, which people add to `rope_parameters` (transformers 5), or those."""
        block = self._fields.get("rope_scaling") or self._fields.get("rope_parameters") or {}
        if not isinstance(block, Mapping):
            raise StartupError(f"config.json: the rope parameters must be an object, got {block!r}")
        return block

    def rope(
        self, dim: int, max_positions: int, *, theta: float = 10000.0, block: Mapping[str, Any] | None = None
    ) -> Rope:
        """Read rotary parameters: `rope_parameters`, or `rope_theta` and `rope_scaling` before transformers 5.

        Args:
            theta: The family's default.
            block: Parameters of one kind of layer.
        """
        block = self.rope_block() if block is None else block
        kind = block.get("rope_type") or block.get("type") or "default"
        self._refuse_other_ropes(block)
        own = block.get("rope_theta")
        found = ModelConfig({"rope_theta": own or self._fields.get("rope_theta")}, _SAME if own else self._names)
        parameters = dict(block)
        original = self._fields.get("original_max_position_embeddings")
        if original is not None and kind in _WITH_ORIGINAL:  # Phi 3 keeps it outside, where it counts first
            parameters["original_max_position_embeddings"] = original
        return Rope(
            kind=str(kind),
            theta=found.number("rope_theta", theta),
            dim=dim,
            max_positions=max_positions,
            parameters=parameters,
        )

    def _refuse_other_ropes(self, block: Mapping[str, Any]) -> None:
        """Refuse rotary parameters that are served for other families: by kind of layer, and Phi MoE's factors."""
        strange = [name for name, value in block.items() if isinstance(value, Mapping)]
        if self.model_type != "phimoe":
            strange += [name for name in _OF_PHIMOE if block.get(name) is not None]
        if strange:
            raise StartupError(
                f"config.json: the rope parameters have `{strange[0]}`, which this version does not serve for "
                f"{self.model_type}"
            )
