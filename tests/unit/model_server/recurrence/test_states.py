"""Slots of states: each request has its own whatever rows come and go, and gives it back when it goes."""

from __future__ import annotations

import random

import pytest
import torch

from model_server.recurrence.states import StatePool, StateShape
from model_server.runner.runner import RequestState

SHAPES = {0: StateShape((2, 3), torch.bfloat16, (1, 2, 2)), 3: StateShape((1, 4), torch.float32, (2, 1, 1))}


def pool() -> StatePool:
    return StatePool(SHAPES, torch.device("cpu"))


def test_a_slot_takes_what_is_said() -> None:
    found = pool()
    assert found.slot_bytes == (2 * 3 * 2 + 4 * 4) + (4 * 4 + 2 * 4)
    found.slots([RequestState(1)], [0])
    layers = [found.layer(index) for index in SHAPES]
    taken = sum(t[0].numel() * t.itemsize for layer in layers for t in (layer.inputs, layer.state))
    assert taken == found.slot_bytes


@pytest.mark.parametrize("seed", range(20))
def test_every_request_has_its_own_whatever_rows_come_and_go(seed: int) -> None:
    chance, found = random.Random(seed), pool()
    running: dict[RequestState, int] = {}
    most = 0
    for _ in range(80):
        if not running or chance.random() < 0.4:
            running[RequestState(1)] = 0
        if len(running) > 1 and chance.random() < 0.3:
            del running[chance.choice(list(running))]
        most = max(most, len(running))
        taking = chance.sample(list(running), chance.randint(1, len(running)))
        slots = found.slots(taking, [running[one] for one in taking])
        assert len(set(slots)) == len(slots)
        for index in SHAPES:
            state = found.layer(index).state
            for one, slot in zip(taking, slots, strict=True):
                if running[one]:
                    assert bool((state[slot] == running[one]).all())
                state[slot] = running[one] + 1
        for one in taking:
            running[one] += 1
    assert len(found.layer(0).state) <= most + max(1, most // 4)


def test_requests_in_the_order_in_which_they_came_have_slots_that_follow_each_other() -> None:
    found = pool()
    requests = [RequestState(1) for _ in range(7)]
    assert found.slots(requests, [0] * 7) == list(range(7))
    del requests[2:4]
    assert found.slots([RequestState(1)], [0]) == [2]


def test_a_request_that_begins_again_keeps_its_slot() -> None:
    found, request = pool(), RequestState(1)
    assert found.slots([request], [0]) == found.slots([request], [5]) == found.slots([request], [0])


def test_a_request_that_goes_on_without_its_state_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the state of a request is gone, of which 4 tokens are said to be computed"):
        pool().slots([RequestState(1)], [4])
