"""What a compressed-tensors config says of modules."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import regex

from model_server.errors import StartupError
from wire.text.patterns import calls_itself

# For files whose config does not say: what DeepSeek's files have, and those that follow them.
DEFAULT_BLOCK = (128, 128)
# Nothing interrupts reading a pattern.
_LONGEST = 2_000
_MATCH_S, _ALL_S = 2.0, 5.0
"""Of one pattern and one name, which takes microseconds, and CPU time of all patterns and all names of a model."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How some modules' matrices are stored."""

    # None: not said.
    bits: int | None = None
    # Rows and columns that share a scale, if blocks.
    block: tuple[int, int] = DEFAULT_BLOCK
    # Made for activations of 8-bit floats.
    float8_inputs: bool = False


@dataclass(slots=True)
class Targets:
    """Modules and how they are stored: by name, pattern, or class."""

    groups: Sequence[tuple[Sequence[str], Weights]]
    # CPU time that patterns have taken.
    _taken_s: float = 0.0

    def weights_of(self, module: str) -> Weights:
        """Return what is said of `module`: names before patterns before classes."""
        for matches in (_names, self._pattern, _class):
            for targets, weights in self.groups:
                if any(matches(target, module) for target in targets):
                    return weights
        return Weights()

    def _pattern(self, target: str, module: str) -> bool:
        """Match a pattern that cannot take hours, alone or with others."""
        if not target.startswith("re:"):
            return False
        if len(target) > _LONGEST or calls_itself(target):
            raise StartupError(
                f"config.json: `config_groups` of the quantization_config has the pattern {target!r:.80}, which calls "
                f"itself or has more than {_LONGEST:,} characters"
            )
        began = time.thread_time()
        try:
            if self._taken_s < _ALL_S:
                return regex.match(target[3:], module, timeout=_MATCH_S) is not None
        except (TimeoutError, MemoryError):
            pass
        except (regex.error, RecursionError, OverflowError):
            return False
        finally:
            self._taken_s += time.thread_time() - began
        raise StartupError(
            f"config.json: `config_groups` of the quantization_config has the pattern {target!r:.80}, which takes too "
            "long to match names"
        )


def targets_of(config: Mapping[str, Any]) -> Targets:
    """Read the targets of a `quantization_config` of the library's shape."""
    groups = config.get("config_groups")
    found = groups.values() if isinstance(groups, Mapping) else ()
    return Targets([_group(group) for group in found if isinstance(group, Mapping)])


def _group(group: Mapping[str, Any]) -> tuple[Sequence[str], Weights]:
    targets, weights = group.get("targets"), group.get("weights")
    names = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
    inputs = group.get("input_activations")
    float8_inputs = isinstance(inputs, Mapping) and (inputs.get("num_bits"), inputs.get("type")) == (8, "float")
    if not isinstance(weights, Mapping):
        return names, Weights(float8_inputs=float8_inputs)
    bits, width, block = weights.get("num_bits"), weights.get("group_size"), weights.get("block_structure")
    if isinstance(block, str):  # "128x128" in the first files
        block = [int(size) for size in block.split("x") if size.isdecimal()]
    known = Weights(bits if _is_count(bits) else None, float8_inputs=float8_inputs)
    if _is_count(width):
        return names, replace(known, block=(1, width))
    if isinstance(block, list) and len(block) == 2 and all(_is_count(size) for size in block):
        return names, replace(known, block=(block[0], block[1]))
    return names, known


def _is_count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _names(target: str, module: str) -> bool:
    return target == module


def _class(target: str, module: str) -> bool:
    """Match linear layers, which all modules asked for are stored as."""
    return target == "Linear"
