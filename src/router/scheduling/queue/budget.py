"""When newcomers join, and how much their Prefill takes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from router.limits import ServingLimits

# Waiting prompts are a backlog if they would take this many steps of the default budget.
BACKLOG_STEPS = 8


@dataclass(frozen=True, slots=True)
class Budget:
    """What the next Prefill may take: `min_size` to `max_size` requests, `prefill_tokens`."""

    min_size: int | None
    max_size: int | None
    prefill_tokens: int
    # Labels `tgi_batch_concat`.
    reason: str = ""
    # To encode for split prompts, one image anyway if `takes_any_image`; None: any.
    image_rows: int | None = None
    takes_any_image: bool = True


def round_up(value: int, multiple: int) -> int:
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
    """Budget beside `num_running` requests; at `max_waiting_tokens` the minimum is dropped."""
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
    """Return a backlog's tokens; None: one budget always."""
    if limits.default_prefill_tokens == limits.max_batch_prefill_tokens:
        return None
    return BACKLOG_STEPS * limits.default_prefill_tokens


def prompts_of_a_step(limits: ServingLimits, *, backlog: bool) -> int:
    return limits.max_batch_prefill_tokens if backlog else limits.default_prefill_tokens


def while_running_in_chunks(
    limits: ServingLimits, num_running: int, current_tokens: int, prompt_tokens: int, *, backlog: bool
) -> Budget:
    """Budget a step shared with running requests: short, but longer with a backlog, which else would wait while a few
    run fast.

    Args:
        current_tokens: The running requests' in that step, `prompt_tokens` of them of prompts.
        backlog: `backlog_tokens` wait, and requests ended meanwhile.
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
