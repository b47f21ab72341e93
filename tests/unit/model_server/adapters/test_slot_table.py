"""Which adapter is in which slot."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model_server.adapters.rows import NARROW_ROWS, TILE_ROWS, most_tiles, row_tiles
from model_server.adapters.slot_table import SlotTable


class Copies:
    def __init__(self, number: int) -> None:
        self.slots: list[int | None] = [None] * number
        self.table = SlotTable(number, self.copy)

    def copy(self, slot: int, number: int) -> bool:
        self.slots[slot] = number
        return number == 7


def test_the_one_used_longest_ago_makes_room() -> None:
    copies = Copies(2)
    first, second = copies.table.acquire(10, tuple), copies.table.acquire(11, tuple)
    assert copies.table.acquire(10, tuple) == first != second
    assert copies.table.acquire(12, tuple) == second
    assert (copies.table.num_loads, copies.table.num_held) == (3, 2)
    assert copies.table.acquire(11, lambda: {first, second}) is None, "rows run with both"
    assert copies.table.acquire(11, lambda: {first}) == second
    copies.table.forget(10)
    assert copies.table.acquire(12, lambda: {second}) == first
    copies.table.forget(99)


def test_an_adapter_that_goes_while_a_slot_is_taken() -> None:
    """What had it may be collected at any moment, on any thread: every rank finds a slot all the same."""
    copies = Copies(1)
    assert copies.table.acquire(10, tuple) == 0

    def in_use() -> tuple[int, ...]:
        copies.table.forget(10)
        return ()

    assert copies.table.acquire(11, in_use) == 0 and copies.slots == [11]
    assert copies.table.acquire(11, tuple) == 0
    assert (copies.table.num_loads, copies.table.num_held) == (2, 1)
    copies.table.forget(11)
    assert copies.table.num_held == 0
    assert copies.table.acquire(11, tuple) == 0, "another of the same number is copied"
    assert (copies.table.num_loads, copies.table.num_held) == (3, 1)


def test_a_copy_that_fails_keeps_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(2)
    first, second = copies.table.acquire(7, tuple), copies.table.acquire(8, tuple)

    def fail(slot: int, number: int) -> bool:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(copies.table, "_copy", fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="no memory"):
                copies.table.acquire(9, lambda: {second})
    assert copies.table.num_held == 1 and copies.table.acquire(8, tuple) == second
    assert copies.table.acquire(9, lambda: {second}) == first and copies.slots == [9, 8]
    assert copies.table.is_capturable(torch.tensor([first])) and copies.table.num_loads == 3


def test_which_steps_need_the_host() -> None:
    copies = Copies(2)
    slot, other = copies.table.acquire(7, tuple), copies.table.acquire(1, tuple)
    assert not copies.table.is_capturable(torch.tensor([-1, other, slot]))
    assert copies.table.is_capturable(torch.tensor([-1, other]))
    copies.table.forget(7)
    assert copies.table.acquire(2, tuple) == slot
    assert copies.table.is_capturable(torch.tensor([slot]))


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(1, 4),
    actions=st.lists(st.tuples(st.sampled_from(["take", "take", "end", "forget"]), st.integers(0, 6)), max_size=60),
)
def test_a_row_finds_its_own_adapter_in_its_slot_until_it_ends(number: int, actions: list[tuple[str, int]]) -> None:
    copies = Copies(number)
    running: dict[int, int] = {}
    for action, adapter in actions:
        if action == "take":
            slot = copies.table.acquire(adapter, lambda: set(running.values()))
            assert (slot is None) == (adapter not in running and len(running) == number)
            if slot is not None:
                running[adapter] = slot
        elif action == "end":
            running.pop(adapter, None)
        elif adapter not in running:
            copies.table.forget(adapter)
        assert all(copies.slots[slot] == adapter for adapter, slot in running.items())
        assert copies.table.num_held <= number


@settings(max_examples=60, deadline=None)
@given(numbers=st.lists(st.integers(-1, 5), max_size=80), wide=st.booleans())
def test_every_row_of_an_adapter_is_in_one_tile_of_it(numbers: list[int], wide: bool) -> None:
    of_rows = np.array(numbers + [-1] * (NARROW_ROWS if wide else 0), np.int64)
    tiles = row_tiles(of_rows)
    rows = [(row, tile[0]) for tile in tiles.tolist() for row in tile[1:] if row >= 0]
    assert sorted(rows) == [(row, number) for row, number in enumerate(of_rows.tolist()) if number >= 0]
    if not wide:
        assert tiles.shape[1] == 1 + TILE_ROWS and len(tiles) <= most_tiles(len(of_rows), 6)
