"""Comparisons with float64, summed up: one line for all that passed, one for each that failed."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.gpu.context import Context

# Norm of the difference relative to the norm of the reference.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
# What `torch.empty` may give out afterwards.
POISONED_BYTES = 256 * 2**20


def limit_of(dtype: torch.dtype) -> float:
    return LIMITS[dtype]


def poison_memory(device: torch.device) -> None:
    """Fill memory that the allocator will hand out next with NaN: an output that is not written shows."""
    if device.type != "cuda":
        return
    for size in (POISONED_BYTES, 2**20, 2**16, 2**12):
        torch.full((size // 4,), float("nan"), device=device)


class Tally:
    """The cases of one kernel family."""

    def __init__(self, context: Context, name: str) -> None:
        self.count = 0
        self._context = context
        self._name = name
        self._worst: dict[str, float] = {}
        self._failed = 0
        self._skipped: list[str] = []

    def compare(self, case: str, found: Tensor, wanted: Tensor, limit: float) -> None:
        """found: of any type, whole of numbers; wanted: float64."""
        self.count += 1
        dtype = str(found.dtype).removeprefix("torch.")
        if found.shape != wanted.shape:
            self._fail(case, f"shape {list(found.shape)} for {list(wanted.shape)}")
            return
        if not bool(found.isfinite().all()):
            self._fail(case, f"{int((~found.isfinite()).sum())} of {found.numel()} are no finite numbers")
            return
        error = float((found.double() - wanted).norm() / wanted.norm().clamp_min(1e-300))
        self._worst[dtype] = max(self._worst.get(dtype, 0.0), error)
        if error > limit:
            self._fail(case, f"relative error {error:.2e}, allowed {limit:.0e}")

    def true(self, case: str, passed: bool, detail: str = "") -> None:
        """Something other than an error in numbers."""
        self.count += 1
        if not passed:
            self._fail(case, detail)

    def left_out(self, case: str) -> None:
        self._skipped.append(case)

    def tell(self) -> None:
        worst = ", ".join(f"{dtype} {error:.1e}" for dtype, error in self._worst.items())
        detail = f"{self.count - self._failed} of {self.count} cases" + (f"; worst error: {worst}" if worst else "")
        self._context.check(self._name, self._failed == 0 and self.count > 0, detail)
        if self._skipped:
            why = f"no time left for {len(self._skipped)} cases, first {self._skipped[0]}"
            self._context.skip(self._name, why)

    def _fail(self, case: str, detail: str) -> None:
        self._failed += 1
        self._context.check(f"{self._name}: {case}", False, detail)
