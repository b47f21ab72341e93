"""The machine's own limits: memory bandwidth, and the rate of matrix products at the row counts of decode and prefill.

Best of several tries each, in the threads that torch takes; looked at again before each server, for they drift.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from model_server.device import available_cpus
from model_server.layers.linear.onednn import weight_packer
from model_server.memory import huge_pages

ROWS = (1, 8, 32, 512)
_SIZE = 4096
_TRIES = 5


def limits() -> dict[str, Any]:
    """Bytes per second and FLOP per second, with the names of processor and libraries."""
    torch.set_num_threads(available_cpus())
    return {
        "processor": processor(),
        "cores": available_cpus(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "read_bytes_per_s": _read_bandwidth(),
        "copy_bytes_per_s": _copy_bandwidth(),
        "flop_per_s": {name: _products(dtype) for name, dtype in
                       (("float32", torch.float32), ("bfloat16", torch.bfloat16))},
    }  # fmt: skip


def _best(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_TRIES):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def _read_bandwidth() -> float:
    data = huge_pages.zeros(128 * 2**20, dtype=torch.float32).fill_(1)
    return data.nbytes / _best(lambda: data.sum())


def _copy_bandwidth() -> float:
    source = torch.ones(64 * 2**20)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source))


def _products(dtype: torch.dtype) -> dict[str, dict[str, float]]:
    """FLOP/s of [rows, 4096] x [4096, 4096], with the plain and with the packed weight; several weights in turn, so
    that none is in a cache."""
    weights = [torch.randn(_SIZE, _SIZE).to(dtype) for _ in range(3)]
    packer = weight_packer(torch.device("cpu"), dtype)
    packed = [packer(w) for w in weights] if packer is not None else []
    rates: dict[str, dict[str, float]] = {"plain": {}, "packed": {}}
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(rows, _SIZE).to(dtype)
            flop = 2 * rows * _SIZE * _SIZE * len(weights)
            rates["plain"][str(rows)] = flop / _best(partial(_multiply, F.linear, x, weights))
            if packed:
                rates["packed"][str(rows)] = flop / _best(partial(_multiply, _packed_product, x, packed))
    return rates


def _multiply(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        product(x, weight)


def _packed_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")  # type: ignore[no-any-return]


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
