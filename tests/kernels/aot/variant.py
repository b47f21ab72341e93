"""What a kernel is compiled for without a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One specialisation of a kernel."""

    name: str
    kernel: Any  # triton.JITFunction
    # Argument name to Triton's type ("*bf16", "*i32", "fp32"); constexpr ones are in `constants`.
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    # Pointers and integers that are multiples of 16.
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    # Capabilities it is not for, such as fp8 on sm_80, by the number that Triton uses (80, 90, 100).
    excluded: frozenset[int] = field(default_factory=frozenset)
