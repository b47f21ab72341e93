"""When newcomers may join a running batch, and how much their Prefill may take. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.limits import ServingLimits

# Waiting prompts are a backlog if they would take this many steps of the default budget.
BACKLOG_STEPS = 8


@dataclass(frozen=True, slots=True)
class Budget:
    """What the next Prefill may take from the queue: `min_size` to `max_size` requests (None: no such bound), prompts
    of `prefill_tokens` tokens to compute.

    `image_rows`: that the shards may encode for it where prompts are split, but always one image if it is
    `takes_any_image`; None: any number.

    `reason` labels `tgi_batch_concat` if something is found.
    """

    min_size: int | None
    max_size: int | None
    prefill_tokens: int
    reason: str = ""
    image_rows: int | None = None
    takes_any_image: bool = True


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def when_idle(limits: ServingLimits) -> Budget:
    """Nothing runs: everything is free."""
    return Budget(
        min_size=None,
        max_size=limits.max_batch_size,
        prefill_tokens=limits.default_prefill_tokens,
        image_rows=limits.max_batch_prefill_tokens,
    )


def while_running(limits: ServingLimits, num_running: int, waiting_tokens: int) -> Budget:
    """A batch of `num_running` requests is running.

    waiting_tokens: 1 after a Prefill, one more
    for each answered Decode since; at `max_waiting_tokens` the minimum is dropped.
    """
    impatient = waiting_tokens >= limits.max_waiting_tokens
    # Rounded down: a ratio that comes to less than one request is no minimum at all (TGI's rule).
    min_size = None if impatient else math.floor(num_running * limits.waiting_served_ratio + 1e-6)
    max_size = None if limits.max_batch_size is None else max(limits.max_batch_size - num_running, 0)
    return Budget(
        min_size=min_size,
        max_size=max_size,
        prefill_tokens=limits.max_batch_prefill_tokens,
        reason="wait_exceeded" if impatient else "backpressure",
    )


def backlog_tokens(limits: ServingLimits) -> int | None:
    """How many waiting tokens of prompts are a backlog; None: all steps have one budget, however many wait."""
    if limits.default_prefill_tokens == limits.max_batch_prefill_tokens:
        return None
    return BACKLOG_STEPS * limits.default_prefill_tokens


def prompts_of_a_step(limits: ServingLimits, *, backlog: bool) -> int:
    """How many tokens of prompts a step may compute. backlog: see `while_running_in_chunks`."""
    return limits.max_batch_prefill_tokens if backlog else limits.default_prefill_tokens


def while_running_in_chunks(
    limits: ServingLimits, num_running: int, current_tokens: int, prompt_tokens: int, *, backlog: bool
) -> Budget:
    """As `while_running` where newcomers share a step with the running requests: none is interrupted.

    What is left to weigh is how long that step may get: as a rule it is short, for those who run and for the first of
    those who wait; with a backlog it is longer, or most would wait for their first token while a few run fast.

    current_tokens: what the running requests will compute in that step, prompt_tokens: how much of it is prompts.
    backlog: at least `backlog_tokens` wait, and requests have ended while they do.
    """
    left = limits.max_batch_prefill_tokens - current_tokens
    max_size = None if limits.max_batch_size is None else max(limits.max_batch_size - num_running, 0)
    return Budget(
        min_size=None,
        max_size=max_size,
        prefill_tokens=max(min(prompts_of_a_step(limits, backlog=backlog) - prompt_tokens, left), 0),
        reason="chunking",
        image_rows=max(limits.max_batch_prefill_tokens - prompt_tokens, 0),  # any of its prompts may be of images
        takes_any_image=not prompt_tokens,
    )
