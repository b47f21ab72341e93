"""Several ranks on several stand-in cards, with torch's NCCL group and symmetric memory, say what one on the CPU says.

Collectives are captured in graphs, and all ranks leave in order.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import CPU, answers_of, ids_of, make_engine, small_sizes
from support.running_server import free_port
from support.tiny_models import tiny_checkpoint

LIMIT_S = 1700
RANK = Path(__file__).with_name("rank.py")


def _run(checkpoint: Path, world: int, stages: int, **environ: str) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """What the ranks said, and what the stand-in saw in each."""
    port = free_port()
    settings = {**os.environ, "FAKE_CARD_DEVICES": str(world), "FAKE_CARD_MEET_S": "600", **environ}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(RANK), str(rank), str(world), str(stages), str(port), str(checkpoint)],
            env=settings,
        )
        for rank in range(world)
    ]
    try:
        assert [rank.wait(LIMIT_S) for rank in ranks] == [0] * world
    finally:
        for rank in ranks:
            rank.kill()
    answers: dict[int, Any] = {}
    for rank in reversed(range(world)):
        answers |= torch.load(checkpoint / f"answers{rank}.pt", weights_only=False)
    return answers, [json.loads((checkpoint / f"seen{rank}.json").read_text()) for rank in range(world)]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("world", "stages", "links"),
    [
        pytest.param(2, 1, False, id="two ranks", marks=pytest.mark.short),
        pytest.param(4, 1, True, id="four ranks with NVLink"),
        pytest.param(2, 2, False, id="two stages"),
        pytest.param(4, 2, False, id="two stages of two ranks"),
    ],
)
def test_ranks_say_what_one_says(world: int, stages: int, links: bool, order: str, tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path / "model", variant="mha")
    with small_sizes(), torch.inference_mode():
        expected = answers_of(make_engine(checkpoint, CPU, torch.float32)[0])
    answers, seen = _run(
        checkpoint, world, stages, FAKE_CARD_ORDER=order, FAKE_CARD_NVLINK=str(int(links)), FAKE_CARD_REPORT=""
    )
    assert ids_of(answers) == ids_of(expected)
    for one in seen:
        assert one["faults"] == {} and one["errors"] == []
        assert one["sizes"], "decode steps are captured"
