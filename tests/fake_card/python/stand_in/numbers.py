"""Makes kernels and operators on the stand-in card compute."""

from __future__ import annotations

import threading

import torch

from stand_in import queued, triton_kernels
from stand_in.operators import Emulation

_is_installed = False


def install() -> None:
    """For this thread and every one that is started from now on. A second call does nothing."""
    global _is_installed
    if _is_installed:
        return
    _is_installed = True
    queued.install()
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN computes nothing
    triton_kernels.install()
    original = threading.Thread.run

    def run(self: threading.Thread) -> None:
        with Emulation():
            original(self)

    threading.Thread.run = run  # type: ignore[method-assign]
    Emulation().__enter__()
