"""How long the windows of a batch are, by what the host has seen of its drafts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from support.graph_doubles import copying_staging

from model_server.batch.sequence import Sequence
from model_server.batch.tables import BlockTables
from model_server.features.drafts.device.speculator import BatchWindows, DeviceSpeculator
from model_server.features.drafts.device.tokens import RowOutcome
from model_server.features.drafts.pace import Pace

CPU = torch.device("cpu")
FLAT = Pace([(1, 1.0), (128, 1.0)])
STEEP = Pace([(1, 1.0), (2, 2.0)])


class Row:
    """What is asked of a sequence; compared and hashed by identity, as sequences are."""

    def __init__(self, **asked: object) -> None:
        parameters = SimpleNamespace(watermark=asked.get("watermark", False), penalises=False)
        self.row = SimpleNamespace(grammar=asked.get("grammar"), parameters=parameters, num_generated=0)
        self.prediction = asked.get("prediction", ())
        self.owned = True


def rows(count: int, **asked: object) -> list[Sequence]:
    return [Row(**asked) for _ in range(count)]  # type: ignore[misc]


def speculator(pace: Pace, most: int = 5, max_rows: int = 128, *, alone: bool = True) -> DeviceSpeculator:
    made = DeviceSpeculator(most, max_rows, CPU, 16, alone=alone)
    made.pace = pace
    return made


def step(made: DeviceSpeculator, windows: BatchWindows, batch: list[Sequence], *, right: bool, draft: int) -> int:
    """A window of these rows, all of whose drafts have `draft` tokens, and are right or wrong. Returns its length."""
    length = made.length(windows, batch)
    windows.state.rows, windows.state.is_stale = batch, False
    windows.submitted(batch, length)
    tokens = SimpleNamespace(outcomes=[RowOutcome(1 + length * right, length, draft, right)] * len(batch))
    windows.seen(batch, tokens, length)  # type: ignore[arg-type]
    return length


@pytest.mark.parametrize(
    ("num_rows", "longest"), [(1, 5), (21, 5), (22, 3), (32, 3), (33, 1), (64, 1), (65, 0), (300, 0)]
)
def test_more_rows_have_shorter_drafts(num_rows: int, longest: int) -> None:
    made, batch = speculator(FLAT), rows(num_rows)
    windows = made.start(copying_staging(), BlockTables(CPU, shares_memory=False))
    assert made.on_device(windows, batch) is (longest > 0)
    if longest:
        lengths = [step(made, windows, batch, right=True, draft=9) for _ in range(30)]
        assert lengths[0] == 0, "nothing is known yet"
        assert lengths[-1] == longest


def test_wrong_drafts_end_drafting_and_then_windows() -> None:
    """Windows of one token look now and then whether drafts would pay: plain steps are between them."""
    made, batch = speculator(Pace([(1, 1.0), (6, 1.5)])), rows(1)
    windows = made.start(copying_staging(), BlockTables(CPU, shares_memory=False))
    for _ in range(20):
        step(made, windows, batch, right=True, draft=5)
    assert windows.length == 5
    lengths = [step(made, windows, batch, right=False, draft=5) for _ in range(60)]
    assert lengths[-1] == 0 and sorted(set(lengths)) == [0, 1, 5]
    windows.rest = 0
    num_windows = 0
    for _ in range(100):
        if made.on_device(windows, batch):
            assert step(made, windows, batch, right=False, draft=5) == 0
            num_windows += 1
        else:
            windows.state.is_stale = True
            windows.rested()
    assert 15 < num_windows < 40
    while not made.on_device(windows, batch):
        windows.rested()
    assert [step(made, windows, batch, right=True, draft=5) for _ in range(40)][-1] == 5


def test_steps_that_cost_what_they_bring_are_plain() -> None:
    assert not speculator(STEEP).on_device(None, rows(1))
    assert not speculator(STEEP).on_host(rows(1, grammar=object()))
    assert not DeviceSpeculator(5, 128, CPU, 16, alone=True).on_device(None, rows(1)), "nothing was measured"


@pytest.mark.parametrize("asked", [{"grammar": object()}, {"watermark": True}, {"prediction": (1, 2)}])
def test_what_needs_the_host_is_drafted_by_the_host(asked: dict[str, object]) -> None:
    made, batch = speculator(FLAT), rows(2) + rows(1, **asked)
    assert made.on_host(batch) and not made.on_device(None, batch)
    assert not made.on_host(rows(2)) and made.on_device(None, rows(2))


@pytest.mark.parametrize(("num_rows", "longest"), [(2, 5), (10, 5), (20, 2), (32, 1)])
def test_drafts_of_the_host_have_no_more_tokens_than_a_step_may(num_rows: int, longest: int) -> None:
    made, batch = speculator(FLAT, max_rows=64), rows(num_rows, prediction=(1, 2))
    for number, row in enumerate(batch):
        vars(row).update(
            id=number, ids=[1, 2, 3, 4, 5, 6] * 3, prompt_length=12, prefill_length=12, cache_length=17, num_sampled=6,
            max_new_tokens=40, slots=range(64),
        )  # fmt: skip
    window = made.window(batch)
    assert window is not None
    assert max(map(len, window.drafts)) == longest
    assert sum(1 + len(draft) for draft in window.drafts) <= 64


def test_ranks_decide_only_where_all_have_seen_the_same() -> None:
    made = speculator(FLAT, alone=False)
    windows, batch = made.start(copying_staging(), BlockTables(CPU, shares_memory=False)), rows(2)
    for _ in range(20):
        step(made, windows, batch, right=True, draft=5)
    assert windows.length == 5
    windows.steps = 1
    assert made.length(windows, rows(3)) == 5, "rows that join do not bring a decision"
    assert made.length(windows, rows(30)) == 3, "but what does not fit is shorter"


def test_known_gains() -> None:
    assert Pace([(1, 1.0), (6, 1.2)]).gain(5, [5], [0.8]) == pytest.approx(3.07, abs=0.01)
    assert Pace([(8, 1.0), (48, 5.0)]).gain(5, [5] * 8, [0.5] * 8) == pytest.approx(0.39, abs=0.01)
    assert Pace([(8, 1.0), (16, 1.5)]).gain(1, [5] * 8, [0.5] * 8) == pytest.approx(1.0)
    assert FLAT.gain(3, [1.5], [1.0]) == pytest.approx(2.5)
