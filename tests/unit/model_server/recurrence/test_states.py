"""States of requests: in place while the same rows continue, and each its own whatever rows come and go."""

from __future__ import annotations

import random

import pytest
import torch

from model_server.recurrence.states import gather, put, start_states
from model_server.runner.runner import RequestState

KEY = (3, "state")
FRESH = torch.zeros(2)


def test_the_same_rows_are_updated_where_they_are() -> None:
    requests = [RequestState(1) for _ in range(3)]
    start_states(requests, [0, 0, 0])
    rows = gather(requests, KEY, FRESH)
    put(requests, KEY, rows)
    rows += 1
    assert gather(requests, KEY, FRESH) is rows
    for others in (requests[:2], requests[::-1], requests[1:]):
        found = gather(others, KEY, FRESH)
        assert found is not rows and torch.equal(found, torch.ones(len(others), 2))


@pytest.mark.parametrize("seed", range(30))
def test_every_request_has_its_own_whatever_rows_come_and_go(seed: int) -> None:
    chance = random.Random(seed)
    running: dict[RequestState, int] = {}
    for _ in range(60):
        if not running or chance.random() < 0.3:
            running[RequestState(1)] = 0
        if len(running) > 1 and chance.random() < 0.2:
            del running[chance.choice(list(running))]
        taking = chance.sample(list(running), chance.randint(1, len(running)))
        if chance.random() < 0.5:
            taking = list(running)
        start_states(taking, [running[one] for one in taking])
        rows = gather(taking, KEY, FRESH)
        put(taking, KEY, rows)
        assert rows[:, 0].tolist() == [float(running[one]) for one in taking]
        rows += 1
        for one in taking:
            running[one] += 1


def test_a_request_begins_again_with_nothing() -> None:
    request = RequestState(1)
    put([request], KEY, torch.full((1, 2), torch.nan))
    start_states([request], [0])
    assert torch.equal(gather([request], KEY, FRESH), FRESH.unsqueeze(0))
    with pytest.raises(RuntimeError, match="the state of a request is gone, of which 4 tokens are said to be computed"):
        start_states([RequestState(1)], [4])
