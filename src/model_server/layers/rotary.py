"""Rotary positions, as complex multiplication of adjacent pairs (x0, x1), (x2, x3), ...

Checkpoints that pair x_i with x_(i + n/2) are reordered at loading (`weights.matrix.HeadOrder`): scores are sums over
pairs.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from model_server.errors import StartupError

# Positions whose angles are computed at first; the table doubles when a sequence grows beyond it.
INITIAL_POSITIONS = 4096

# A kind that no config can name.
UNROTATED = ""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary parameters; `dim` numbers of a head rotate."""

    kind: str
    theta: float
    dim: int
    max_positions: int
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sections(self) -> tuple[int, ...]:
        """Return how many pairs follow each row of positions [3, n] (`mrope_section`); empty: all the first."""
        value = self.parameters.get("mrope_section")
        if value is None:
            return ()
        is_counts = isinstance(value, list) and len(value) == 3 and all(type(n) is int and n >= 0 for n in value)
        if not is_counts or sum(value) != self.dim // 2:
            raise StartupError(f"config.json: `mrope_section` must be three counts of {self.dim // 2} pairs in all")
        return tuple(value)

    @property
    def axes(self) -> Tensor | None:
        """Return each pair's row of positions, [dim / 2] int64; None: the first.

        Interleaved (`mrope_interleaved`), the second and third row have every third pair.
        """
        sections = self.sections
        if not sections:
            return None
        if not self.parameters.get("mrope_interleaved"):
            return torch.arange(3).repeat_interleave(torch.tensor(sections))
        axes = torch.zeros(self.dim // 2, dtype=torch.int64)
        for row in (1, 2):
            axes[row : 3 * sections[row] : 3] = row
        return axes

    def number(self, name: str, default: float | None = None) -> float:
        """Return a positive parameter, or its default."""
        value = self.parameters.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise StartupError(
                f"config.json: rope scaling {self.kind!r} needs a positive number `{name}`, got {value!r}"
            )
        return float(value)


def unrotated(dim: int) -> Rope:
    """Return what leaves all numbers as they are, for what always rotates."""
    return Rope(UNROTATED, 1.0, dim, INITIAL_POSITIONS)


def inverse_frequencies(rope: Rope, longest: int = 0) -> tuple[Tensor, float]:
    """Return angles per position [dim / 2] float32, and the factor on cos and sin, for sequences up to `longest`."""
    function = _KINDS.get(rope.kind)
    if function is None:
        raise StartupError(
            f"config.json: rope scaling {rope.kind!r} is not served; served: {', '.join(filter(None, _KINDS))}"
        )
    return function(rope, longest)


def _default(rope: Rope, longest: int) -> tuple[Tensor, float]:
    return _plain(rope), 1.0


def _linear(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Divide positions by the factor, which TGI's static constructor ignores."""
    return _plain(rope) / rope.number("factor"), 1.0


def _unrotated(rope: Rope, longest: int) -> tuple[Tensor, float]:
    return torch.zeros(rope.dim // 2), 1.0


def _llama3(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Divide long waves by the factor, keep short ones, blend between (Llama 3.1)."""
    factor, low, high = rope.number("factor"), rope.number("low_freq_factor"), rope.number("high_freq_factor")
    turns = rope.number("original_max_position_embeddings", rope.max_positions) * _plain(rope) / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    plain = _plain(rope)
    return plain * keep + plain / factor * (1 - keep), 1.0


def _yarn(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Compute YaRN (arXiv 2309.00071) with defaults and mscale of transformers' ROPE_INIT_FUNCTIONS."""
    original = rope.number("original_max_position_embeddings", rope.max_positions)
    factor = rope.number("factor", rope.max_positions / original)
    fast, slow = rope.number("beta_fast", 32), rope.number("beta_slow", 1)

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(fast), dimension(slow)
    if rope.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    plain = _plain(rope)

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.parameters.get("attention_factor") is not None:
        scale = rope.number("attention_factor")
    elif rope.parameters.get("mscale") and rope.parameters.get("mscale_all_dim"):
        scale = mscale(rope.number("mscale")) / mscale(rope.number("mscale_all_dim"))
    else:
        scale = mscale(1.0)
    return plain * keep + plain / factor * (1 - keep), scale


def _proportional(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Rotate a part of the pairs, by the whole head's frequencies, and leave the others as they are (Gemma 4)."""
    pairs = int(rope.number("partial_rotary_factor", 1.0) * rope.dim // 2)
    frequencies = _plain(rope) / rope.number("factor", 1.0)
    frequencies[pairs:] = 0.0
    return frequencies, 1.0


def _dynamic(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Grow the base with sequences beyond the config's positions (dynamic NTK)."""
    factor, beyond = rope.number("factor"), max(longest / rope.max_positions, 1.0)
    base = rope.theta * (factor * beyond - (factor - 1)) ** (rope.dim / (rope.dim - 2))
    return _plain(dataclasses.replace(rope, theta=base)), 1.0


def _longrope(rope: Rope, longest: int) -> tuple[Tensor, float]:
    """Compute LongRoPE (arXiv 2402.13753), with other factors beyond the original length."""
    original = _original_length(rope)
    factor = rope.number("factor", rope.max_positions / original)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    reach = "long" if longest > original else "short"
    scale = rope.number(f"{reach}_mscale", rope.number("attention_factor", default))
    return _plain(rope) / _factors(rope, f"{reach}_factor"), scale


def _original_length(rope: Rope) -> int:
    return int(rope.number("original_max_position_embeddings", rope.max_positions))


def _factors(rope: Rope, name: str) -> Tensor:
    values = rope.parameters.get(name)
    if (
        not isinstance(values, list)
        or len(values) != rope.dim // 2
        or not all(type(v) in (int, float) and 0 < v < math.inf for v in values)
    ):
        raise StartupError(
            f"config.json: rope scaling {rope.kind!r} needs {rope.dim // 2} positive numbers in `{name}`"
        )
    return torch.tensor(values, dtype=torch.float32)


def _plain(rope: Rope) -> Tensor:
    return 1.0 / (rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim))


_KINDS: dict[str, Callable[[Rope, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "dynamic": _dynamic,
    "proportional": _proportional,
    "longrope": _longrope,
    "su": _longrope,
    UNROTATED: _unrotated,
}
_BY_LENGTH = ("dynamic", "longrope", "su")


class Rotations:
    """The rotations of a forward's tokens: rows of `table` [num_positions, dim / 2] complex64 at positions [n]
    int64.
    """

    __slots__ = ("_gathered", "_real_table", "positions", "table")

    def __init__(self, table: Tensor, positions: Tensor) -> None:
        self.table = table
        self.positions = positions
        self._gathered: Tensor | None = None
        self._real_table: Tensor | None = None

    @property
    def gathered(self) -> Tensor:
        """Look up [n, 1, dim / 2] complex64, once for all layers."""
        if self._gathered is None:
            self._gathered = self.table.index_select(0, self.positions).unsqueeze(1)
        return self._gathered

    @property
    def real_table(self) -> Tensor:
        """View the table as [num_positions, dim] float32, cos and sin side by side."""
        if self._real_table is None:
            self._real_table = torch.view_as_real(self.table).flatten(1)
        return self._real_table


class Rotary:
    """Rotations of one Rope by position, in a table that grows with the longest sequence."""

    # Where they depend on how long sequences get, all have the same: cached keys keep their rotation when a sequence
    # grows, and rows do not depend on others. The length is that of `set_longest`, before it the longest seen.
    def __init__(self, rope: Rope, device: torch.device) -> None:
        self._rope = rope
        self._device = device
        self._longest = 0
        self._is_set = rope.kind not in _BY_LENGTH
        axes = rope.axes
        self._axes = None if axes is None else axes.to(device)
        self._table = self._rotations(min(rope.max_positions, INITIAL_POSITIONS))

    def set_longest(self, longest: int) -> None:
        """No sequence will be longer."""
        if self._rope.kind in _BY_LENGTH:
            self._use(longest)
            self._is_set = True

    def reserve(self, max_positions: int) -> None:
        """Compute so many positions now; up to there the table keeps its address, which CUDA graphs need."""
        if max_positions > self._table.shape[0]:
            self._table = self._rotations(max_positions)

    def rotations(self, positions: Tensor, max_length: int) -> Rotations:
        """Return the rotations of `positions` [n], or [3, n] by `Rope.sections`, as a table of the step."""
        if not self._is_set and max_length - 1 > self._longest:
            self._use(max_length - 1)
        if max_length > self._table.shape[0]:
            self.reserve(max(max_length, 2 * self._table.shape[0]))
        if positions.dim() == 1:
            return Rotations(self._table, positions)
        if self._axes is None:
            return Rotations(self._table, positions[0])
        pairs = torch.arange(len(self._axes), device=positions.device)
        table = self._table[positions[self._axes].T, pairs]
        return Rotations(table, torch.arange(len(table), device=positions.device))

    def _use(self, longest: int) -> None:
        self._longest = longest
        self._table = self._rotations(self._table.shape[0])

    def _rotations(self, num_positions: int) -> Tensor:
        frequencies, scale = inverse_frequencies(self._rope, self._longest)
        positions = torch.arange(num_positions, dtype=torch.float32, device=self._device)
        angles = torch.outer(positions, frequencies.to(self._device))
        return torch.polar(torch.full_like(angles, scale), angles)


def rotate_(heads: Tensor, rotations: Tensor) -> None:
    """Rotate `heads` [n, num_heads, dim] in place by `rotations` [n, 1, dim / 2]."""
    wide = heads if heads.dtype == torch.float32 else heads.float()
    torch.view_as_complex(wide.view(*wide.shape[:-1], -1, 2)).mul_(rotations)
    if wide is not heads:
        heads.copy_(wide)
