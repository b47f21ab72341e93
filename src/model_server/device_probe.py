"""`python -m model_server.device_probe`: one line of JSON on this machine's GPUs, by torch and Triton."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from model_server.kernels.availability import refusal


def probe() -> dict[str, Any]:
    """Return the versions of torch and of its build's CUDA, the usable GPUs, and why there are none or no kernels."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "gpus": count,
        "reason": next((str(one.message).splitlines()[0] for one in said), None),
        "triton": refusal(torch.device("cuda", 0)) if count else None,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
