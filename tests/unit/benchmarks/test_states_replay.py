"""The simulated chats of `benchmarks.states`: what they have in common, and that the router's policy is worth it."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from benchmarks.states import BLOCK, MANY_BLOCKS, SHAPES, PlainSlots, Shape, conversation, replay
from router.scheduling.cache.prefix_cache import PrefixCache
from router.scheduling.cache.states import StateSlots


@pytest.mark.parametrize("name", SHAPES)
def test_each_prompt_has_what_was_in_front_of_the_answers_before(name: str) -> None:
    asked = list(conversation(SHAPES[name], [9] * 50, random.Random(0)))
    assert len(asked) >= 8
    for one, later in pairwise(asked):
        start = one.answer_start - 2
        assert later.prompt[:start] == one.prompt[:start] and one.answer_start <= later.answer_start


def test_fewer_tokens_are_computed_than_by_saving_ends_alone() -> None:
    shape = Shape(calls=(1, 2))
    shares = [
        replay(shape, PrefixCache(MANY_BLOCKS, BLOCK, kind(7, 64)), num_chats=4, num_active=3)
        for kind in (StateSlots, PlainSlots)
    ]
    bound = replay(shape, PrefixCache(MANY_BLOCKS, 1), num_chats=4, num_active=3)
    assert bound < shares[0] < shares[1] < 1
