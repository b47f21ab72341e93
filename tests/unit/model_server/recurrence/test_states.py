"""Slots of states: each request has its own, and may begin with what another one saved."""

from __future__ import annotations

import pytest
import torch

from model_server.recurrence.states import StatePool, StateShape
from model_server.runner.runner import RequestState

SHAPES = {0: StateShape((2, 3), torch.bfloat16, (1, 2, 2)), 3: StateShape((1, 4), torch.float32, (2, 1, 1))}


def pool(num_slots: int = 0) -> StatePool:
    found = StatePool(SHAPES, torch.device("cpu"))
    found.reserve(num_slots)
    for index in SHAPES:
        for slot in range(num_slots):
            found.layer(index).state[slot], found.layer(index).inputs[slot] = slot, slot
    return found


def contents(found: StatePool, slot: int) -> list[float]:
    layers = [found.layer(index) for index in SHAPES]
    return [float(t[slot].unique()) for layer in layers for t in (layer.inputs, layer.state)]


def test_a_slot_takes_what_is_said() -> None:
    found = pool(1)
    assert found.slot_bytes == (2 * 3 * 2 + 4 * 4) + (4 * 4 + 2 * 4)
    layers = [found.layer(index) for index in SHAPES]
    taken = sum(t[0].numel() * t.itemsize for layer in layers for t in (layer.inputs, layer.state))
    assert taken == found.slot_bytes


def test_there_are_as_many_as_are_asked_for_and_none_is_lost() -> None:
    found = pool(3)
    found.reserve(2)
    assert found.num_slots == 3
    assert found.start([RequestState(1, 4), RequestState(1, 1)], [0, 0]) == [4, 1]
    assert found.num_slots == 5 and [contents(found, slot) for slot in range(3)] == [[slot] * 4 for slot in range(3)]


def test_a_restored_state_is_copied_once_before_its_slot_is_another_s() -> None:
    found = pool(6)
    earlier = RequestState(1, 1, restored_from=2)
    later = RequestState(1, 2, restored_from=3)  # it got the slot of the earlier one's checkpoint
    assert found.start([earlier, later, RequestState(1, 4)], [16, 16, 0]) == [1, 2, 4]
    assert [contents(found, slot)[0] for slot in range(6)] == [0, 2, 3, 3, 4, 5]
    for index in SHAPES:
        found.layer(index).state[1] = 9
    found.start([earlier], [20])
    assert contents(found, 1)[1] == 9


def test_a_request_that_goes_on_without_its_state_is_refused() -> None:
    with pytest.raises(RuntimeError, match="a request has no state, of which 4 tokens are said to be computed"):
        pool().start([RequestState(1)], [4])
