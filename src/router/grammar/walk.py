"""Walks a grammar byte by byte: many bounds and costs show only on the way."""

from __future__ import annotations

import random
from time import thread_time

from llguidance import LLMatcher

MOST_STEP_S = 0.25
"""CPU time of one step: ordinary ones take less than a millisecond, and the model's tokens take more than bytes."""

_WALKS = 3
_STEPS = 32
_LIMIT_S = 0.06
_MOST_FORCED = 4096


def walked(matcher: LLMatcher, *, seed: int) -> LLMatcher:
    """Return the matcher, unmoved, or one that failed on the way.

    Raises:
        ValueError: A step takes too long.
    """
    chance, began = random.Random(seed), thread_time()
    for _ in range(_WALKS):
        walker = matcher.deep_copy()
        for _ in range(_STEPS):
            if walker.is_error() or walker.is_stopped() or thread_time() - began > _LIMIT_S:
                break
            _step(walker, chance)
        if walker.is_error():
            return walker
    return matcher


def _step(matcher: LLMatcher, chance: random.Random) -> None:
    """Take what is forced, and one possible token."""
    began = thread_time()
    for forced in matcher.compute_ff_tokens()[:_MOST_FORCED]:
        matcher.consume_token(forced)
    mask = 0 if matcher.is_error() or matcher.is_stopped() else int.from_bytes(matcher.compute_bitmask(), "little")
    if mask and not matcher.is_error():
        matcher.consume_token(_next_of(mask, chance.randrange(mask.bit_length())))
    if thread_time() - began > MOST_STEP_S:
        raise ValueError("a single token takes too much time: name fewer alternatives, or make it unambiguous")


def _next_of(mask: int, place: int) -> int:
    """Return the first token at or behind this place."""
    rest = mask >> place
    return place + (rest & -rest).bit_length() - 1
