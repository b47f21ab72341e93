"""Whether kernels can run here; asked before one is imported."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

# bfloat16 products, asynchronous copies and 64 KiB of shared memory and more: Ampere and later.
OLDEST_CAPABILITY = (8, 0)


def usable(device: torch.device) -> bool:
    """Whether Triton runs here: on a GPU of capability 8.0, or interpreted (TRITON_INTERPRET=1, for tests)."""
    return refusal(device) is None


@cache
def refusal(device: torch.device) -> str | None:
    """Say why no kernel can run on `device`; the first call runs one, and logs a failure."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if device.type == "cuda":
        if torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
            return "the GPU's compute capability is below 8.0"
        return _failed_trial(device)
    if device.type == "cpu" and _trial().INTERPRETED:
        return None
    return f"Triton compiles for GPUs, not for {device.type}"


def has_float8(device: torch.device) -> bool:
    """Whether kernels convert float8_e4m3fn: from capability 8.9, and interpreted."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)


def _trial() -> Any:
    return importlib.import_module("model_server.kernels.trial")  # needs Triton


def _failed_trial(device: torch.device) -> str | None:
    try:
        _trial().launch(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Triton compiles a launcher in C for every kernel: without a compiler it raises RuntimeError, without Python's
        # headers CalledProcessError, and other versions raise other things.
        reason = f"Triton cannot compile on this host ({type(error).__name__}: {str(error).partition(chr(10))[0]})"
        logger.warning(
            "No Triton kernel can run on %s: %s. Triton needs a C compiler and Python's headers; install gcc and "
            "python3-dev (on Debian and Ubuntu). Until then the shard computes with torch's own operators, which "
            "is slower",
            device,
            reason,
        )
        return reason
    return None
