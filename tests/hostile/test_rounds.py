"""A short form of `make soak`: one round of each attack, the same checks."""

from __future__ import annotations

import pytest
from hostile.attacks.mixed_load import MixedLoad
from hostile.rounds import Rounds, Sizes
from hostile.target import target, vision_target
from support.effort import examples

# A round takes a minute or two on a quiet machine.
pytestmark = [pytest.mark.e2e, pytest.mark.weekly, pytest.mark.timeout(900)]


def test_one_round() -> None:
    sizes = Sizes(
        bodies=examples(120, 500), raw=examples(24, 100), leaving=examples(40, 120), grpc=examples(40, 60), workers=2,
        overload=examples(0, 60), mixed_seconds=examples(2, 5), launches=examples(0, 1), folders=examples(1, 3),
        grammars=examples(3, 6), responses=examples(12, 40), heads=examples(8, 20),
    )  # fmt: skip
    mixed = MixedLoad(num_long=examples(3, 6), num_short=examples(9, 14), long_tokens=(150, 300), least=51)
    with target() as attacked:
        seen = {outcome.name: outcome.seen for outcome in Rounds(attacked, seed=7, sizes=sizes, mixed=mixed).one()}
    assert min(seen["random bodies"][status] for status in ("200", "400", "422")) > 10
    assert seen["mixed load"]["compared"] > 50 and seen["mixed load"]["preempted"] > 0
    assert seen["killed workers"]["killed"] > 0
    assert seen["expensive grammars"]["beside 200"] > 0 and seen["chained responses"]["response 200"] > 0


def test_random_pictures() -> None:
    with vision_target() as attacked:
        (outcome,) = Rounds(attacked, seed=7, sizes=Sizes(pictures=examples(100, 300))).one()
    seen = outcome.seen
    assert seen["pictures"] >= examples(100, 300) and seen["sound 200"] > 30 and seen["harmful 422"] > 15


def test_servers_of_images() -> None:
    with vision_target() as attacked:
        (outcome,) = Rounds(attacked, seed=7, sizes=Sizes(image_servers=examples(24, 60))).one()
    seen = outcome.seen
    assert all(seen[f"{kind} 422"] > 0 for kind in ("tiny", "interim", "fields", "bytes")) and seen["sound 200"] > 0


def test_connections_of_tls() -> None:
    with target() as attacked:
        (outcome,) = Rounds(attacked, seed=7, sizes=Sizes(silent_tls=examples(16, 200))).one()
    assert outcome.seen["silent ended"] >= examples(16, 200) and outcome.seen["single bytes 200"] > 0
