"""`python -m model_server.device_probe`: one line of JSON with what torch and Triton say of this machine's GPUs."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch

from model_server.kernels.availability import refusal


def probe() -> dict[str, Any]:
    """torch: its version; cuda: of its build, None for one for CPUs; gpus: how many it can use; reason: why none, if
    the driver says; triton: why its kernels do not run on the first GPU, None if they do or there is no GPU."""
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
