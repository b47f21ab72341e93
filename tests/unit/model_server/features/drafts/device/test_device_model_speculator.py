"""How long windows are where drafting takes time, and when a drafter is left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.graph_doubles import copying_staging
from unit.model_server.features.drafts.device.test_device_speculator import rows

from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.features.drafts.device.model_speculator import DeviceModelSpeculator
from model_server.features.drafts.device.speculator import BatchWindows
from model_server.features.drafts.device.tokens import RowOutcome
from model_server.features.drafts.drafters.drafts import LookedUp
from model_server.features.drafts.pace import Pace
from model_server.features.drafts.speculator import Draft
from wire.step_phases import DraftKind

CPU = torch.device("cpu")
FLAT = Pace([(1, 1.0), (128, 1.0)])


class Drafter:
    """What is asked of a `Drafter`. A place of a draft takes `place` seconds."""

    pace = FLAT

    def __init__(self, place: float = 0.0, *, is_lost: bool = False) -> None:
        self.place = place
        self.is_lost_in_plain_steps = is_lost

    def seconds(self, num_rows: int, length: int) -> float:
        return self.place * length

    def retains(self) -> str:
        return "all"

    def start(self, staging: object) -> LookedUp:
        return LookedUp(lambda *_: pytest.fail("nothing is computed here"), 3)


def batch_of(count: int, **asked: object) -> list[Sequence]:
    batch = rows(count, **asked)
    for row in batch:
        row.drafts_from = 1
    return batch


def speculator(drafter: Drafter, pace: Pace = FLAT, *, alone: bool = True) -> DeviceModelSpeculator:
    made = DeviceModelSpeculator(3, 64, CPU, 16, drafter, alone=alone)  # type: ignore[arg-type]
    made.pace = pace
    return made


def windows_of(made: DeviceModelSpeculator) -> BatchWindows:
    return made.start(copying_staging(), BlockTables(CPU, shares_memory=False))


def step(made: DeviceModelSpeculator, windows: BatchWindows, batch: list[Sequence], *, right: bool) -> int:
    """A window all of whose drafts are right or wrong, or a plain step; the length of its drafts."""
    if windows.rest and not made.on_device(windows, batch):
        windows.rested()
        return 0
    length = made.length(windows, batch)
    windows.state.rows, windows.state.is_stale = batch, False
    windows.submitted(batch, length)
    outcome = RowOutcome(1 + length * right, length, length, right if length else None)
    tokens: Any = SimpleNamespace(outcomes=[outcome] * len(batch))
    drafted = windows.seen(batch, tokens, length)
    assert drafted.tokens[DraftKind.MODEL] == length * len(batch)
    return length


@pytest.mark.parametrize(("place", "longest"), [(0.0, 3), (0.5, 3), (0.7, 3), (1.2, 0)])
def test_drafts_that_take_longer_than_they_bring_are_not_made(place: float, longest: int) -> None:
    made, batch = speculator(Drafter(place)), batch_of(2)
    windows = windows_of(made)
    assert made.on_device(windows, batch) is (longest > 0)
    if longest:
        lengths = [step(made, windows, batch, right=True) for _ in range(1200)]
        assert lengths[-1] == longest


def test_where_drafts_are_wrong_a_few_steps_look_again() -> None:
    made, batch = speculator(Drafter(0.2)), batch_of(2)
    windows = windows_of(made)
    assert step(made, windows, batch, right=False) > 0, "what is not known is tried"
    lengths = [step(made, windows, batch, right=False) for _ in range(3000)][100:]
    assert set(lengths) == {0, 1}
    assert 8 <= sum(lengths) <= 0.03 * len(lengths) + 8
    assert made.on_device(windows, [*batch, *batch_of(1)]), "what joins is tried"
    lengths = [step(made, windows, batch, right=True) for _ in range(1500)]
    assert lengths[-1] == 3


def steps_until_given_up(made: DeviceModelSpeculator, windows: BatchWindows, batch: list[Sequence]) -> int:
    for count in range(3000):
        if not made.on_device(windows, batch):
            return count
        step(made, windows, batch, right=False)
    raise AssertionError("never given up")


def test_a_drafter_that_has_to_see_every_step_is_given_up() -> None:
    """For these requests, not for those that come."""
    made, batch = speculator(Drafter(0.2, is_lost=True)), batch_of(2)
    windows = windows_of(made)
    assert steps_until_given_up(made, windows, batch) < 50
    assert not made.on_host(batch)
    assert all(row.drafts_from is None for row in batch)
    assert made.retains_plain(batch) is None
    joined = [*batch, *batch_of(1)]
    assert made.on_device(windows, joined)
    assert steps_until_given_up(made, windows, joined) < 50


def test_requests_for_which_a_drafter_is_known_not_to_pay_are_given_up_at_once_but_once_in_a_pause() -> None:
    made, windows = speculator(Drafter(0.2, is_lost=True)), None
    for _ in range(8):
        windows, batch = windows_of(made), batch_of(2)
        steps_until_given_up(made, windows, batch)
        windows.release([])
    windows, batch = windows_of(made), batch_of(2)
    assert steps_until_given_up(made, windows, batch) == 1
    for _ in range(3000):
        assert made.retains_plain(batch) is None
    windows, batch = windows_of(made), batch_of(2)
    assert step(made, windows, batch, right=False) == 1, "whether it would pay now is tried"
    assert steps_until_given_up(made, windows, batch) < 50
    windows, batch = windows_of(made), batch_of(2)
    assert step(made, windows, batch, right=False) == 0


def test_where_drafts_pay_for_a_request_alone_many_of_them_do_not_give_the_drafter_up() -> None:
    made = speculator(Drafter(0.2, is_lost=True), Pace([(1, 1.0), (10, 1.0), (20, 1.55), (64, 6.0)]))
    windows, batch = windows_of(made), batch_of(1)
    assert step(made, windows, batch, right=True) > 0
    joined = [*batch, *batch_of(9)]
    assert made.on_device(windows, joined), "right guesses would pay for them"
    lengths = [step(made, windows, joined, right=True) for _ in range(100)]
    assert lengths[-1] == 0
    assert batch[0].drafts_from is not None


def test_what_nobody_knows_of_many_requests_is_looked_at_soon() -> None:
    """Waiting costs as much as a look where the drafter has to see every step."""
    made, batch = (
        speculator(Drafter(0.2, is_lost=True), Pace([(1, 1.0), (10, 1.0), (20, 1.55), (64, 6.0)])),
        batch_of(10),
    )
    windows = windows_of(made)
    assert made.on_device(windows, batch) and step(made, windows, batch, right=False) == 0
    assert steps_until_given_up(made, windows, batch) < 100


def test_a_drafter_that_does_not_pay_is_given_up_where_the_host_drafts_too() -> None:
    made, batch = speculator(Drafter(0.2, is_lost=True)), batch_of(2, grammar=object())
    assert made.retains_plain(batch) == "all"
    assert made._look_or_give_up(batch) == 0
    assert made.retains_plain(batch) is None


def test_what_ended_requests_teach_does_not_depend_on_where_their_objects_lie() -> None:
    """Ranks must expect the same; the order of a set would differ between them."""
    found = []
    for first in (0, 1):
        made, batch = speculator(Drafter()), batch_of(40)
        windows = windows_of(made)
        objects = [*batch[first:], *batch[:first]]  # other addresses for the same requests
        for place, one in enumerate(windows.known(objects)):
            one.acceptance.share = place / 40
        windows.release([])
        found.append(made.first_share)
    assert found[0] == found[1]
    expected = 0.5
    for place in range(40):
        expected += 0.5 * (place / 40 - expected)
    assert found[0] == pytest.approx(expected)


def test_steps_without_drafts_are_kept_from_a_drafter_that_has_to_see_all_but_where_the_host_drafts() -> None:
    made = speculator(Drafter(is_lost=True))
    many, few = batch_of(40), batch_of(2, grammar=object())
    assert not made.on_device(None, many)
    assert made.retains_plain(few) == "all" and few[0].drafts_from is not None
    assert made.retains_plain(many) is None and many[0].drafts_from is None
    other, many = speculator(Drafter()), batch_of(40)
    assert other.retains_plain(many) == "all" and many[0].drafts_from is not None


def test_a_drafter_that_takes_too_long_keeps_the_host_from_nothing() -> None:
    made = speculator(Drafter(100.0))
    assert not made.on_device(None, batch_of(2)) and not made.on_host(batch_of(2))
    assert made.on_host(batch_of(2, grammar=object()))


def test_where_the_hosts_drafts_do_not_pay_one_step_in_many_tries() -> None:
    made, draft = speculator(Drafter(0.2)), Draft([], others=DraftKind.MODEL)
    lengths = [made._best_length([draft], [range(3)], [3], [0.0], FLAT) for _ in range(600)]
    assert [step for step, length in enumerate(lengths) if length] == list(range(31, 600, 32))
    assert made._best_length([draft], [range(3)], [3], [1.0], FLAT) == 3
