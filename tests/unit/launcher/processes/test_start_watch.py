"""A start that takes its time: who is late, what everybody is doing, and where the seconds went."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from unit.launcher.fake_children import plain, router, shard
from unit.launcher.supervised import Launch

from launcher.command import Command
from launcher.errors import ShardCannotStart, WebserverCannotStart, WebserverFailed
from launcher.processes.child import Child

_PHASES = """
import signal, time
from wire import phases
from wire.processes import stack_dump
from wire.log import log_setup
log_setup.configure(True, "ERROR", rank={rank})
stack_dump.answer_requests()
phases.enter(phases.IMPORTING)
{more}
def forgotten_collective():
    time.sleep(600)
forgotten_collective()
"""


def _told(phase: str) -> str:
    """A line of a program that tells of a phase."""
    record = {"level": "DEBUG", "message": f"Phase: {phase}", "target": "wire.phases", "phase": phase}
    return f"print({json.dumps(record)!r}, flush=True)\n"


def stuck(folder: Path, rank: int, more: str = "") -> Command:
    command = plain(_PHASES.format(rank=rank, more=more))
    return Command(name="shard", rank=rank, argv=command.argv, env=command.env, socket=str(folder / f"never-{rank}"))


def wait_until(launch: Launch, condition: Callable[[Child], bool]) -> None:
    """As `on_started`: until it is so for every shard. The time for getting ready runs from then on."""
    launch.hurry_at("Starting shard", 1.5)

    def wait() -> None:
        deadline = time.monotonic() + 60
        assert launch.supervisor is not None
        while not all(condition(child) for child in launch.supervisor.model.children):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    launch.on_started = wait


def is_in(phase: str) -> Callable[[Child], bool]:
    return lambda child: child.logs.progress.phase == phase


def test_who_is_late_is_named_with_its_phase_and_everybodys_stacks_are_shown(launch: Launch) -> None:
    ahead = "phases.enter(phases.PROCESS_GROUP)"
    wait_until(launch, lambda child: is_in("process group" if child.command.rank == 0 else "importing")(child))
    with pytest.raises(ShardCannotStart, match=r"^shard 1 was not ready \S+ s after .*; phase: importing for \d+ s; "):
        launch.serve([stuck(launch.folder, 0, ahead), stuck(launch.folder, 1)], survivors_s=0.2)
    for rank, phase in ((0, "process group"), (1, "importing")):
        [text] = [line for line in launch.story.lines if line.startswith(f"Stacks of shard {rank} ({phase} for ")]
        assert "in forgotten_collective" in text and "most recent call first" in text


def test_a_process_that_is_stopped_has_no_stacks_and_the_log_says_why(launch: Launch) -> None:
    wait_until(launch, is_in("importing"))
    stops = stuck(launch.folder, 0, "import os; os.kill(os.getpid(), signal.SIGSTOP)")
    with pytest.raises(ShardCannotStart, match="phase: importing"):
        launch.serve([stops], survivors_s=0.2)
    assert launch.story.has("No stacks of shard 0 (importing for ")
    assert launch.story.has("its state is T (stopped)")


@pytest.mark.long
def test_a_child_that_does_not_listen_yet_is_not_killed_by_the_question(launch: Launch) -> None:
    deaf = plain('import time; print(\'{"level": "INFO", "message": "up"}\', flush=True); time.sleep(600)')
    deaf = Command(name="shard", rank=0, argv=deaf.argv, env=deaf.env, socket=str(launch.folder / "never"))
    wait_until(launch, lambda child: child.logs.last_message == "up")
    with pytest.raises(ShardCannotStart, match="was not ready"):
        launch.serve([deaf], survivors_s=5.0)
    assert launch.story.has("No stacks of shard 0")
    assert launch.story.has("its state is S (sleeping)")


@pytest.mark.long
def test_a_warm_up_that_does_not_end_is_the_shards_fault(launch: Launch) -> None:
    record = _told("warm-up")
    warming = shard(launch.folder)
    program = warming.argv[2].replace("server.start()\n", record + "server.start()\n")
    launch.hurry_at("Starting Webserver", 1.0)
    never = plain("import time; time.sleep(600)", name="router")
    never = Command(name="router", argv=never.argv, env=never.env, url=f"http://127.0.0.1:{launch.port}")
    with pytest.raises(ShardCannotStart, match=r"^shard 0 was not ready .*; phase: warm-up for "):
        launch.serve([shard(launch.folder, program=program)], never, failing_router_s=0.2)


@pytest.mark.long
def test_a_router_that_is_not_ready_in_time(launch: Launch) -> None:
    launch.hurry_at("Starting Webserver", 1.0)
    never = plain("import time; time.sleep(600)", name="router")
    never = Command(name="router", argv=never.argv, env=never.env, url=f"http://127.0.0.1:{launch.port}")
    with pytest.raises(WebserverCannotStart, match=r"^router was not ready .*; phase: starting for "):
        launch.serve(router_command=never, failing_router_s=0.2)


@pytest.mark.parametrize("status", ["STALLED", "MISSING_PEER"])
def test_stacks_are_shown_when_somebody_has_waited_in_vain(launch: Launch, status: str) -> None:
    leave = f"import sys; from wire.exit_status import {status}; sys.exit({status})"
    shards = [shard(launch.folder, 0), stuck(launch.folder, 1)]
    if status == "STALLED":
        listens = shard(launch.folder, 0)
        program = "from wire.processes import stack_dump; stack_dump.answer_requests()\n" + listens.argv[2]
        shards = [shard(launch.folder, 0, program=program)]
        with pytest.raises(WebserverFailed, match="status 5"):
            launch.serve(shards, router(launch.folder, launch.port, program=leave))
    else:
        gives_up = stuck(launch.folder, 0, f"time.sleep(1); {leave}")
        with pytest.raises(ShardCannotStart, match="shard 0 exited with status 6"):
            launch.serve([gives_up, shards[1]], survivors_s=0.2)
    assert launch.story.has("Stacks of shard ")


def test_where_the_seconds_went(launch: Launch) -> None:
    launch.stop_at("Start-up\n")
    record = _told("loading")
    slow = "import time; time.sleep(0.2)\n" + record + "time.sleep(0.2)\n" + shard(launch.folder).argv[2]
    assert launch.serve([shard(launch.folder, program=slow)], own_phases=[("imports", 0.25), ("checks", 0.125)]) == 0
    ready = next(line for line in launch.story.lines if line.startswith("Ready on"))
    assert re.search(r"before the shards \S+ s, shard 0 \S+ s \(starting \S+, loading \S+\), router \S+ s", ready)
    table = next(line for line in launch.story.lines if line.startswith("Start-up\n")).splitlines()[1:]
    names = [
        "launcher   imports",
        "           checks",
        "shard 0    starting",
        "           loading",
        "router     starting",
        "total",
    ]
    assert [row.rpartition(" s")[0].rsplit(maxsplit=1)[0].rstrip() for row in table] == names
    took = [float(row.split()[-2]) for row in table]
    assert took[:2] == [0.25, 0.125] and took[3] >= 0.2 and took[-1] >= sum(took[2:-1]) - 0.01
