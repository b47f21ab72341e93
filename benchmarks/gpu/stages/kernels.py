"""S1: what the card computes, through the interfaces that models use, against float64. Each family is a process."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.gpu.cases import attention as attention_cases
from benchmarks.gpu.cases import elementwise as elementwise_cases
from benchmarks.gpu.cases import matrix as matrix_cases
from benchmarks.gpu.cases import quantized as quantized_cases
from benchmarks.gpu.cases import sampling as sampling_cases
from benchmarks.gpu.context import Context

PARTS: dict[str, Callable[[Context], None]] = {
    "paged decode": attention_cases.run_decode,
    "paged prefill": attention_cases.run_prefill,
    "element-wise": elementwise_cases.run,
    "sampling": sampling_cases.run,
    "experts": matrix_cases.run_experts,
    "products": matrix_cases.run_products,
    "quantized products": quantized_cases.run_products,
}
