"""When a running batch yields to a Prefill, and how much that Prefill may take. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.limits import ServingLimits

# Prompts that wait are many if they would take so many calm steps.
CROWD_STEPS = 8


@dataclass(frozen=True, slots=True)
class Admission:
    """Arguments of the next look into the queue; `reason` labels `tgi_batch_concat` if it finds something."""

    min_size: int | None
    max_size: int | None
    prefill_budget: int
    token_budget: int
    reason: str


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def when_idle(limits: ServingLimits) -> Admission:
    """Nothing runs: everything is free."""
    return Admission(
        min_size=None,
        max_size=limits.max_batch_size,
        prefill_budget=limits.calm_prefill_tokens,
        token_budget=limits.max_batch_total_tokens,
        reason="",
    )


def while_running(limits: ServingLimits, num_running: int, used_tokens: int, waiting_tokens: int) -> Admission:
    """A batch of `num_running` requests is running.

    used_tokens: what its requests may come to hold, as the shard counts it. waiting_tokens: 1 after a Prefill, one more
    for each answered Decode since; at `max_waiting_tokens` the minimum is dropped.
    """
    impatient = waiting_tokens >= limits.max_waiting_tokens
    # Rounded down: a ratio that comes to less than one request is no minimum at all (TGI's rule).
    min_size = None if impatient else math.floor(num_running * limits.waiting_served_ratio + 1e-6)
    max_size = None if limits.max_batch_size is None else max(limits.max_batch_size - num_running, 0)
    return Admission(
        min_size=min_size,
        max_size=max_size,
        prefill_budget=limits.max_batch_prefill_tokens,
        token_budget=max(limits.max_batch_total_tokens - used_tokens, 0),
        reason="wait_exceeded" if impatient else "backpressure",
    )


def is_crowd_of(limits: ServingLimits) -> int | None:
    """How many waiting tokens of prompts are a crowd; None: steps are of one length, whoever waits."""
    if limits.calm_prefill_tokens == limits.max_batch_prefill_tokens:
        return None
    return CROWD_STEPS * limits.calm_prefill_tokens


def prompts_of_a_step(limits: ServingLimits, *, crowd: bool) -> int:
    """How many tokens of prompts a step may compute. crowd: see `while_running_in_chunks`."""
    return limits.max_batch_prefill_tokens if crowd else limits.calm_prefill_tokens


def while_running_in_chunks(
    limits: ServingLimits, num_running: int, current_tokens: int, prompt_tokens: int, *, crowd: bool
) -> Admission:
    """As `while_running` where newcomers share a step with the running requests: nobody is interrupted.

    What is left to weigh is how long that step may get: as a rule it is short, for those who run and for the first of
    those who wait; a crowd gets longer ones, or most of it would wait for its first token while a few run fast.

    current_tokens: what the running requests will compute in that step, prompt_tokens: how much of it is prompts.
    crowd: at least `is_crowd_of` tokens wait, and requests have ended while they do.
    """
    left = limits.max_batch_prefill_tokens - current_tokens
    max_size = None if limits.max_batch_size is None else max(limits.max_batch_size - num_running, 0)
    return Admission(
        min_size=None,
        max_size=max_size,
        prefill_budget=max(min(prompts_of_a_step(limits, crowd=crowd) - prompt_tokens, left), 0),
        token_budget=limits.max_batch_total_tokens,
        reason="chunking",
    )
