"""Rotary frequencies that depend only on the position.

transformers chooses the factors of longrope, and the base of dynamic NTK scaling, by the largest position of the whole
forward: in a batch a row's result would depend on the other rows. Here each position has the frequencies of a sequence
that ends there (for longrope as TGI: short factors below the original length, long ones from there on), which is what
a sequence gets that is decoded alone.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

# Positions added to a table at a time.
_GROWTH = 256


def make_static(model: Any) -> list[StaticRotary]:
    """Replace the forward of every rotary module of `model` whose frequencies depend on the batch."""
    replaced = []
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        forward = type(module).forward
        plain = inspect.unwrap(forward)
        if plain is forward or not isinstance(kinds, str | dict):
            continue
        if any(_depends_on_length(kind) for kind in (kinds.values() if isinstance(kinds, dict) else [kinds])):
            module.forward = StaticRotary(module, plain)
            replaced.append(module.forward)
    return replaced


def _depends_on_length(kind: str) -> bool:
    return kind == "longrope" or "dynamic" in kind


class StaticRotary:
    """Stands in for one rotary module's forward. plain: that forward without the update of its frequencies.

    `length` is one more than the largest position of the running forward; None: the device is asked, which waits.
    """

    def __init__(self, module: Any, plain: Callable[..., Any]) -> None:
        self._module = module
        self._plain = plain
        self.length: int | None = None
        self._tables: dict[tuple[str | None, torch.dtype], _Table] = {}

    def __call__(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Any:
        """x: only its type and device count. position_ids: [1, num_tokens] -> what the module gives for them."""
        kinds = self._module.rope_type
        kind = kinds if layer_type is None else kinds[layer_type]
        arguments = {} if layer_type is None else {"layer_type": layer_type}
        if not _depends_on_length(kind):
            return self._plain(self._module, x, position_ids, **arguments)
        table = self._tables.get((layer_type, x.dtype))
        if table is None:
            table = self._tables[layer_type, x.dtype] = _Table(self._module, self._plain, kind, layer_type)
        return table.look_up(x, position_ids, self.length or int(position_ids.max()) + 1)


@contextlib.contextmanager
def known_length(rotaries: Sequence[StaticRotary], length: int) -> Iterator[None]:
    """Inside, all positions are below `length`, and the device need not be asked."""
    for rotary in rotaries:
        rotary.length = length
    try:
        yield
    finally:
        for rotary in rotaries:
            rotary.length = None


class _Table:
    """What a rotary module gives for each position, in one dtype; grows with the longest sequence seen."""

    def __init__(self, module: Any, plain: Callable[..., Any], kind: str, layer_type: str | None) -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        self._module, self._plain, self._kind = module, plain, kind
        self._arguments = {} if layer_type is None else {"layer_type": layer_type}
        self._buffer = "inv_freq" if layer_type is None else f"{layer_type}_inv_freq"
        self._frequencies = ROPE_INIT_FUNCTIONS[kind]
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        if kind == "longrope":
            self._limit = int(parameters["original_max_position_embeddings"])
        else:
            self._limit = int(module.config.max_position_embeddings)
        self._parts: tuple[Tensor, ...] = ()
        self._is_tuple = True
        self._size = 0

    def look_up(self, x: Tensor, position_ids: Tensor, needed: int) -> Any:
        """All positions are below `needed`."""
        if needed > self._size:
            self._grow(x, -(-needed // _GROWTH) * _GROWTH)
        found = tuple(part[:, position_ids[0]] for part in self._parts)
        return found if self._is_tuple else found[0]

    def _grow(self, x: Tensor, size: int) -> None:
        start = self._size
        pieces = []
        if start < self._limit:
            pieces.append(self._compute(x, start, min(size, self._limit), self._limit))
        first = max(start, self._limit)
        if self._kind == "longrope" and first < size:
            pieces.append(self._compute(x, first, size, self._limit + 1))
        elif first < size:
            pieces.extend(self._compute(x, p, p + 1, p + 1) for p in range(first, size))
        if self._parts:
            pieces.insert(0, self._parts)
        self._parts = tuple(torch.cat(part, dim=1) for part in zip(*pieces, strict=True))
        self._size = size

    def _compute(self, x: Tensor, first: int, last: int, length: int) -> tuple[Tensor, ...]:
        """Positions [first, last) with the frequencies of a sequence of `length`."""
        module = self._module
        frequencies, _ = self._frequencies(module.config, x.device, seq_len=length, **self._arguments)
        before = getattr(module, self._buffer)
        setattr(module, self._buffer, frequencies)
        try:
            positions = torch.arange(first, last, device=x.device).unsqueeze(0)
            found = self._plain(module, x, positions, **self._arguments)
        finally:
            setattr(module, self._buffer, before)
        self._is_tuple = isinstance(found, tuple)
        return found if self._is_tuple else (found,)
