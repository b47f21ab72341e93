"""Runs `parity.library_worker` as a group of processes."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TESTS = Path(__file__).parents[1]


def run_ranks(
    world_size: int, jobs: Mapping[str, tuple[str, list[Tensor]]], folder: Path, timeout_s: float
) -> list[dict[str, Any]]:
    """What each rank made of the jobs, by job: logits, or a sentence; what a rank did not come to is absent."""
    folder.mkdir(parents=True, exist_ok=True)
    jobs_file = folder / "jobs.pt"
    torch.save(dict(jobs), jobs_file)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (folder / "log").open("wb") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "parity.library_worker", str(rank), str(world_size), str(port), str(jobs_file)],
                cwd=TESTS, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )
            for rank in range(world_size)
        ]  # fmt: skip
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout_s)
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    files = [folder / f"rank{r}of{world_size}.pt" for r in range(world_size)]
    return [torch.load(f) if f.is_file() else {} for f in files]
