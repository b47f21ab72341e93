"""Micro-batches on their way through the stages of a pipeline, step by step."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Simulated:
    """cycle_s: mean time between two steps of a micro-batch. efficiency: the share of the time in which the busiest
    stage works."""

    cycle_s: float
    efficiency: float


def simulate(
    num_stages: int, num_micro_batches: int, stage_s: float, hop_s: float, back_s: float,
    *, spread: float = 0.0, num_steps: int = 4000, seed: int = 0,
) -> Simulated:  # fmt: skip
    """Every stage takes the steps in the order of their numbers, one at a time. A micro-batch's next step begins when
    the ids of its last one are back at the first stage.

    spread: each stage's time is drawn from stage_s * (1 - spread) to stage_s * (1 + spread).
    """
    dice = random.Random(seed)
    free_at = [0.0] * num_stages
    ready_at = [0.0] * num_micro_batches
    busy_s = [0.0] * num_stages
    for step in range(num_steps):
        come_at = ready_at[step % num_micro_batches]
        for stage in range(num_stages):
            takes_s = stage_s * dice.uniform(1 - spread, 1 + spread)
            free_at[stage] = max(free_at[stage], come_at) + takes_s
            busy_s[stage] += takes_s
            come_at = free_at[stage] + (hop_s if stage + 1 < num_stages else back_s)
        ready_at[step % num_micro_batches] = come_at
    elapsed = max(free_at)
    return Simulated(elapsed * num_micro_batches / num_steps, max(busy_s) / elapsed)
