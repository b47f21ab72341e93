"""A short form of `make soak-models`: random load over several models, the same checks."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hostile.several.load import RandomLoad
from hostile.several.served import served
from support.effort import examples

pytestmark = [pytest.mark.e2e, pytest.mark.weekly, pytest.mark.timeout(900)]


def test_random_load() -> None:
    with served() as running:
        load = RandomLoad(running, seed=7)
        seen = sum((asyncio.run(load(examples(30, 100))) for _ in range(2)), Counter())  # the second may hold no more
    assert seen["200"] > 10 and seen["batches"] > 0 and seen["403"] > 0 and seen["killed"] > 0
