"""Rotary frequencies that are the same for all sequences: those of the longest to come."""

# transformers chooses the factors of longrope, and the base of dynamic NTK scaling, by the largest position of the
# whole forward: in a batch a row's result would depend on the other rows, and keys in the cache on how long their
# sequence was when they were written. Here all have the frequencies of the longest sequence that will come.

from __future__ import annotations

import inspect
from functools import partial
from typing import Any


class LengthRotary:
    """Frequencies of one rotary module, by kind of layers."""

    def __init__(self, module: Any, kind: str, layer_type: str | None) -> None:
        self._module, self._kind = module, kind
        self._arguments = {} if layer_type is None else {"layer_type": layer_type}
        self._buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"

    def set_longest(self, longest: int) -> None:
        """No sequence will be longer."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        buffer = getattr(self._module, self._buffer)
        make = ROPE_INIT_FUNCTIONS[self._kind]
        frequencies, _ = make(self._module.config, buffer.device, seq_len=longest, **self._arguments)
        setattr(self._module, self._buffer, frequencies)


def by_length(model: Any) -> list[LengthRotary]:
    """Return `model`'s rotations by length, which its forwards no longer choose."""
    found = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        forward = type(module).forward
        plain = inspect.unwrap(forward)
        if plain is forward or not isinstance(kinds, str | dict):
            continue
        of_layers = kinds if isinstance(kinds, dict) else {None: kinds}
        depending = {name: kind for name, kind in of_layers.items() if kind == "longrope" or "dynamic" in kind}
        if depending:
            module.forward = partial(plain, module)
            found += [LengthRotary(module, kind, name) for name, kind in depending.items()]
    return found
