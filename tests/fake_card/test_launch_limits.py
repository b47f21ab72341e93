"""Launches of more rows than a GPU takes on a second axis."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Kernels compute nothing in a process of its own: the interpreter would run hundreds of thousands of programs.
_SAMPLES = """
import torch
from model_server.kernels.sampling.sampling import SampledRows, sample

rows, vocab, device = int(sys.argv[1]), 1100, torch.device("cuda", 0)


def full(value, dtype):
    return torch.full((rows,), value, dtype=dtype, device=device)


for greedy, unfiltered in ((rows, 0), (0, rows), (0, 0)):
    taken = SampledRows(
        rows=torch.arange(rows, dtype=torch.int32, device=device), seeds=full(0, torch.int64),
        counts=full(0, torch.int64), temperature=full(1, torch.float32), top_k=full(vocab, torch.int32),
        dropped=full(0.1, torch.float64), min_p=full(-torch.inf, torch.float32), num_greedy=greedy,
        num_unfiltered=unfiltered,
    )
    packed = torch.empty(3, rows, dtype=torch.float64, device=device)
    sample(torch.empty(rows, vocab, device=device), taken, 51, full(0, torch.int64), packed)
torch.cuda.synchronize()
print("launched")
"""


@pytest.mark.short
def test_a_step_samples_more_rows_than_a_second_axis_takes() -> None:
    """Greedy, unfiltered and filtered ones."""
    environ = {**os.environ, "FAKE_CARD_KERNELS": "null", "FAKE_CARD_REPORT": ""}
    command = [sys.executable, "-c", "import sys\n" + _SAMPLES, "65536"]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert ran.stdout == "launched\n", ran.stderr
