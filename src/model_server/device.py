"""What this process computes on: device, number type, threads. The only file outside `attention/` that asks.

Knows nothing of models beyond their size.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

from model_server.errors import StartupError

CPU_INFO = Path("/proc/cpuinfo")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

# Weight files below this size: the weights fit in a server CPU's cache, and reading them is not what a step costs.
SMALL_MODEL_BYTES = 128 * 2**20

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def resolve_device(rank: int, world_size: int) -> torch.device:
    """The CUDA device of this rank if there is one (CUDA_VISIBLE_DEVICES="" hides them all), else the CPU.

    Raises StartupError if there are GPUs, but fewer than shards.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if world_size > count:
        raise StartupError(f"{world_size} shards need as many GPUs, {count} visible; lower --num-shard")
    device = torch.device("cuda", rank % count)
    torch.cuda.set_device(device)
    return device


def resolve_dtype(requested: str | None, device: torch.device, weight_file_bytes: int) -> torch.dtype:
    """The type of weights, activations and KV cache. `requested`: the user's `--dtype`.

    Unset on a GPU: float16, as TGI. Unset on a CPU: bfloat16 where the CPU multiplies it natively, else float32; but a
    model of less than SMALL_MODEL_BYTES stays in float32, where its decode steps are as quick, and exact.
    Raises StartupError for a word that is none of DTYPES.
    """
    if requested is not None:
        if requested not in DTYPES:
            raise StartupError(f"--dtype {requested} is unknown; choose one of {', '.join(DTYPES)}")
        return DTYPES[requested]
    if device.type == "cuda":
        return torch.float16
    if weight_file_bytes >= SMALL_MODEL_BYTES and has_native_bfloat16():
        return torch.bfloat16
    return torch.float32


def has_native_bfloat16() -> bool:
    """Whether this CPU has instructions for bfloat16 products (AVX-512 BF16, AMX, Arm BF16)."""
    try:
        flags = CPU_INFO.read_text().split()
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def use_threads(world_size: int) -> int:
    """Give this rank its share of the CPUs it may use, unless OMP_NUM_THREADS says otherwise; returns the number."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, available_cpus() // world_size))
    return torch.get_num_threads()


def available_cpus() -> int:
    """CPUs that this process may run on: its affinity, cut by the container's quota (rounded up)."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return count
