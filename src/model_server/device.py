"""What this process computes on: device, number type, threads, memory of the C library."""

from __future__ import annotations

import ctypes
import math
import os
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from model_server.cpp.library import usable
from model_server.cpp.openmp import release_threads
from model_server.errors import StartupError
from wire.host.machine import multiplies_bfloat16

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")

# GPUs before Ampere have no bfloat16 products.
OLDEST_WITH_BFLOAT16 = (8, 0)

# Weight files below this size: the whole model fits in a server CPU's cache, and steps are a few milliseconds.
SMALL_MODEL_BYTES = 128 * 2**20

# Blocks of this size are mapped on their own while weights are loaded; setting it also ends glibc's raising of it.
LOADING_MMAP_THRESHOLD = 2**20

# <malloc.h>
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def resolve_device(local_rank: int, num_ranks: int) -> torch.device:
    """Return the CUDA device of one of this node's `num_ranks` ranks, or the CPU if there is none.

    Raises:
        StartupError: There are fewer GPUs than shards.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if num_ranks > count:
        raise StartupError(f"{num_ranks} shards need {num_ranks} GPUs; visible: {count}; lower --num-shard")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def enter(device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the thread that computes on `device`."""
    # Inference mode and CUDA's current device belong to a thread: a new one has device 0, where rank 1 would record
    # events that end before its own work does.
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return torch.inference_mode()


def resolve_dtype(
    requested: str | None,
    device: torch.device,
    stored_in: str | None = None,
    *,
    needs_bfloat16: bool = False,
    is_native: bool = True,
) -> torch.dtype:
    """Choose the type of weights, activations and KV cache.

    Args:
        requested: `--dtype`.
        stored_in: The checkpoint's type, in safetensors' words.
        is_native: Our own decoder runs the model.
    """
    # Unset on a GPU: float16 where the checkpoint has it and the model does not need bfloat16's range, or the GPU has
    # no bfloat16; else bfloat16. Unset on a CPU: bfloat16 where the checkpoint has it, unless only torch's operators
    # could multiply it without the CPU's instructions (3 to 4 times slower than float32). float16 becomes bfloat16
    # where there are such instructions. All else is float32.
    if requested is not None:
        if requested not in DTYPES:
            raise StartupError(f"--dtype {requested} is unknown; choose one of {', '.join(DTYPES)}")
        return DTYPES[requested]
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < OLDEST_WITH_BFLOAT16:
            return torch.float16
        return torch.float16 if stored_in == "F16" and not needs_bfloat16 else torch.bfloat16
    if stored_in in ("BF16", "F16") and multiplies_bfloat16():
        return torch.bfloat16
    if stored_in == "BF16" and is_native and usable(device, torch.bfloat16):
        return torch.bfloat16
    return torch.float32


def tune(device: torch.device, num_ranks: int, weight_file_bytes: int, *, keep_threads: bool = False) -> int:
    """Set up this process' threads and memory for `device`, once, before the first product; return the threads.

    On a CPU the threads are the CPUs divided by the node's `num_ranks`, unless `keep_threads`; large
    blocks go back to the system when they are freed, until `finish_loading`.
    """
    # A small model leaves one CPU to the router: its operators are so short that a thread waiting for a busy core costs
    # more than it brings (on two busy cores each parallel operator takes a scheduler slice, 4 ms).
    if device.type != "cpu":
        return torch.get_num_threads()
    if not keep_threads:
        cpus = available_cpus()
        if weight_file_bytes < SMALL_MODEL_BYTES:
            cpus -= 1
        torch.set_num_threads(max(1, cpus // num_ranks))
    _set_malloc({_M_MMAP_THRESHOLD: LOADING_MMAP_THRESHOLD})
    return torch.get_num_threads()


def finish_loading(device: torch.device) -> None:
    """Keep freed activations from now on, and end the loading thread's helpers; on a CPU, once weights are loaded."""
    # Otherwise every activation of more than a few 100 KiB faults in zeroed pages at each layer (a gather of 8 MiB took
    # twice as long). While weights are loaded it would be wrong: matrices on their way to a packed layout leave holes,
    # a third of the model's size (measured on 1 GB).
    if device.type == "cpu":
        _set_malloc({_M_MMAP_THRESHOLD: 2**30, _M_TRIM_THRESHOLD: 2**31 - 1})
        release_threads()


def _set_malloc(options: dict[int, int]) -> None:
    """Set parameters of glibc's malloc, if it is the C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)


def available_cpus() -> int:
    """Count the CPUs of this process: affinity, cut by the container's quota."""
    count = len(os.sched_getaffinity(0))
    try:
        quota, period = CPU_QUOTA.read_text().split()
        return min(count, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such file, or "max": no quota
        return count
