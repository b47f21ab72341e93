"""Which models are loaded: on demand, at the start, idle, for room, after failures."""

from __future__ import annotations

import itertools
import random

import pytest
from pool_world import World

from launcher.groups.pool import LEAST_LOADED_S, PATIENCE_S


def test_a_request_loads_its_model_and_is_answered() -> None:
    world = World({"a": 40, "b": 40})
    world.run(2)
    assert world.states() == {"a": "unloaded", "b": "unloaded"}
    world.request("a")
    world.run(6)
    assert world.states() == {"a": "loaded", "b": "unloaded"}
    assert world.num_answered == 1


def test_those_of_the_start_are_loaded_one_after_the_other() -> None:
    world = World({"a": 40, "b": 40, "c": 10}, a={"preload": True}, b={"preload": True})
    world.step()
    assert world.states() == {"a": "loading", "b": "unloaded", "c": "unloaded"}
    assert not world.pool.is_well
    world.run(9)
    assert world.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    assert world.pool.is_well


@pytest.mark.parametrize(
    ("keep_alive_s", "idle_s", "state"),
    [(None, 1e5, "loaded"), (30, 25, "loaded"), (30, 34, "unloaded"), (0, 3, "unloaded")],
)
def test_an_idle_model_is_unloaded(keep_alive_s: float | None, idle_s: float, state: str) -> None:
    world = World({"a": 40}, a={"keep_alive_s": keep_alive_s})
    world.request("a", 20.0)
    world.run(23.0)
    assert world.states() == {"a": "loaded"}
    world.run(idle_s + 2, step_s=0.5 if idle_s < 1000 else 100)
    assert world.states() == {"a": state}


def test_a_batch_keeps_its_model_loaded() -> None:
    world = World({"a": 40}, a={"keep_alive_s": 5})
    world.request("a")
    world.run(5)
    world.batches = {"a"}
    world.run(60)
    assert world.states() == {"a": "loaded"}
    world.batches = set()
    world.run(4)
    assert world.states() == {"a": "loaded"}  # the end of a batch is a use
    world.run(3)
    assert world.states() == {"a": "unloaded"}


def test_a_batch_makes_room_and_returns_when_there_is_some() -> None:
    world = World({"a": 60, "b": 60}, b={"keep_alive_s": 30})
    world.batches = {"a"}
    world.run(5)
    assert world.states() == {"a": "loaded", "b": "unloaded"}
    world.run(LEAST_LOADED_S)
    world.request("b")
    world.run(7)
    assert world.states() == {"a": "unloaded", "b": "loaded"} and world.num_answered == 1
    world.run(20)
    assert world.states() == {"a": "unloaded", "b": "loaded"}  # a batch takes nobody's room
    world.run(20)
    assert world.states() == {"a": "loaded", "b": "unloaded"}


def test_clients_keep_the_room_that_another_ones_batch_makes() -> None:
    world = World({"a": 50, "b": 50, "c": 50})
    world.batches = {"a"}
    world.request("b", 100.0)
    world.run(10 + LEAST_LOADED_S)
    assert world.states() == {"a": "loaded", "b": "loaded", "c": "unloaded"}
    world.request("c")
    world.run(7)
    assert world.states() == {"a": "unloaded", "b": "loaded", "c": "loaded"}


def test_batches_load_nothing_that_an_operator_has_unloaded() -> None:
    world = World({"a": 60})
    world.batches = {"a"}
    world.run(6)
    world.pool.unload("a")
    world.run(60)
    assert world.states() == {"a": "unloaded"}
    world.request("a")
    world.run(60)
    assert world.states() == {"a": "loaded"}
    world = World({"a": 60}, autoload=False)
    world.batches = {"a"}
    world.run(10)
    assert world.states() == {"a": "unloaded"}


def test_the_least_recently_used_makes_room() -> None:
    world = World({"a": 40, "b": 40, "c": 40})
    for name in ("a", "b"):
        world.request(name)
        world.run(6)
    world.run(LEAST_LOADED_S)
    world.request("a")
    world.run(1)
    world.request("c")
    world.run(8)
    assert world.states() == {"a": "loaded", "b": "unloaded", "c": "loaded"}


def test_one_that_was_just_loaded_stays_for_a_while() -> None:
    world = World({"a": 60, "b": 60})
    world.request("a")
    world.run(5)
    world.request("b")
    world.run(LEAST_LOADED_S - 3)
    assert world.states() == {"a": "loaded", "b": "unloaded"}
    world.run(10)
    assert world.states() == {"a": "unloaded", "b": "loaded"}
    assert world.num_answered == 2


def test_one_that_is_never_idle_gives_way_after_a_while_and_ends_its_requests_first() -> None:
    world = World({"a": 60, "b": 60})
    world.request("b")
    world.request("a", 5.0)
    for _ in range(int(PATIENCE_S + LEAST_LOADED_S) + 20):
        world.request("a", 5.0)
        world.run(1)
        if world.states()["b"] == "loaded":
            break
    assert world.states() == {"a": "unloaded", "b": "loaded"}
    world.run(60)
    assert not any(world.waiting.values())
    assert world.processes["a"].num_stops == 1


def test_most_models() -> None:
    world = World({"a": 1, "b": 1}, models=1)
    for name in ("a", "b", "a"):
        world.request(name)
        world.run(30)
        assert [one for one, state in world.states().items() if state == "loaded"] == [name]


def test_a_failed_start_is_tried_again_later_and_later() -> None:
    world = World({"a": 40})
    world.processes["a"].fails = True
    starts = []
    for _ in range(4000):
        world.waiting["a"] = [0.1]
        before = world.states()["a"]
        world.step()
        if world.states()["a"] == "loading" != before:
            starts.append(world.now)
    waits = [round(later - sooner - 4) for sooner, later in itertools.pairwise(starts)]
    assert waits[:6] == [10, 20, 40, 80, 160, 300]
    assert world.pool.members["a"].error == "damaged"
    world.processes["a"].fails = False
    world.pool.load("a")  # an operator need not wait
    world.run(6)
    assert world.states() == {"a": "loaded"}


def test_a_crash() -> None:
    """One of the start comes back at once, others on demand; the next crash soon after waits."""
    world = World({"a": 40, "b": 40}, a={"preload": True})
    world.request("b")
    world.run(12)
    for name in ("a", "b"):
        world.processes[name].crash()
    world.step()
    assert not world.pool.is_well
    world.run(6)
    assert world.states() == {"a": "loaded", "b": "failed"}
    world.request("b")
    world.run(6)
    assert world.states()["b"] == "loaded"
    assert world.pool.is_well
    world.processes["a"].crash()
    world.run(8)
    assert world.states()["a"] == "failed"
    world.run(8)
    assert world.states()["a"] == "loaded"
    world.run(100, step_s=1)
    world.processes["a"].crash()
    world.run(6)
    assert world.states()["a"] == "loaded"


def test_without_autoload_only_an_operator_loads() -> None:
    world = World({"a": 40}, autoload=False)
    world.request("a")
    world.run(10)
    assert world.states() == {"a": "unloaded"}
    world.pool.load("a")
    world.run(6)
    assert world.states() == {"a": "loaded"}
    assert world.num_answered == 1


def test_an_operator_unloads_whatever_runs_and_while_it_loads() -> None:
    world = World({"a": 40, "b": 40})
    world.request("a", 30.0)
    world.run(6)
    world.pool.unload("a")
    world.run(10)
    assert world.states()["a"] == "loaded"  # its request still runs
    world.run(25)
    assert world.states()["a"] == "unloaded"
    assert world.num_answered == 1
    world.pool.load("b")
    world.run(1)
    world.pool.unload("b")
    world.run(3)
    assert world.states()["b"] == "unloaded"


@pytest.mark.random
@pytest.mark.parametrize("seed", range(6))
def test_random_order(seed: int) -> None:
    """Memory is never exceeded, no request is lost, and each that waits is answered in the end."""
    chance = random.Random(seed)
    names = [f"m{number}" for number in range(chance.randint(2, 5))]
    world = World(
        {name: chance.randint(10, 90) for name in names},
        models=chance.choice([None, None, 1, 2]),
        **{name: {"preload": chance.random() < 0.2, "keep_alive_s": chance.choice([None, 0, 5, 60])} for name in names},
    )
    for _ in range(1000):
        world.random_step(chance)
    world.run(1500, step_s=1)
    assert not any(world.waiting.values()), world.states()
    assert not any(world.running.values())
