"""Replicas whose shards end while others serve."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from unit.launcher.fake_children import shard
from unit.launcher.supervised import Launch

from launcher.command import Command
from launcher.errors import ShardFailed
from launcher.processes import model_processes


def of_replica(folder: Path, replica: int, rank: int = 0) -> Command:
    made = shard(folder, 2 * replica + rank)
    return dataclasses.replace(made, replica=replica, rank=rank)


def shards(folder: Path, num_ranks: int = 1) -> list[Command]:
    return [of_replica(folder, replica, rank) for replica in (0, 1) for rank in range(num_ranks)]


def kill(launch: Launch, at: str, *replicas: int) -> None:
    def now() -> None:
        for child in launch.running():
            if child.command.replica in replicas and child.command.rank == 0:
                child.kill()

    launch.story.at(at, now)


def test_the_shards_of_one_replica_start_again(launch: Launch) -> None:
    kill(launch, "Ready on", 1)
    launch.stop_at("replica 1 starts again, others serve")
    assert launch.serve(shards(launch.folder, num_ranks=2)) == 0
    assert launch.story.has("shard 0 of replica 1 was killed by signal 9")
    assert not launch.story.has("replica 0 starts again")


def test_not_if_all_have_ended(launch: Launch) -> None:
    kill(launch, "Ready on", 0, 1)
    with pytest.raises(ShardFailed, match=r"of replica [01] was killed by signal 9"):
        launch.serve(shards(launch.folder))


def test_not_for_ever(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_processes, "_MOST_RESTARTS", 1)
    kill(launch, "Ready on", 1)
    kill(launch, "replica 1 starts again", 0)
    with pytest.raises(ShardFailed, match="of replica 0 was killed by signal 9"):
        launch.serve(shards(launch.folder))
