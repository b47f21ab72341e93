"""What a kernel is compiled for when no device is there: the shapes of real models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One specialisation of a kernel. Every file with kernels has `variants() -> list[Variant]`.

    signature: argument name -> Triton's word for its type ("*bf16", "*i32", "i32", "fp32"); constexpr arguments are
    in `constants` alone. divisible: names of pointers and integers that are known to be multiples of 16, as at launch.
    """

    name: str
    kernel: Any  # triton.JITFunction
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 3
    # Capabilities it is not for, such as fp8 on sm_80, by the number that Triton uses (80, 90, 100).
    excluded: frozenset[int] = field(default_factory=frozenset)
