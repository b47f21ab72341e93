"""Start order, watch, stop order and exit status, with small real processes."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from unit.launcher.fake_children import journal, plain, router, shard
from unit.launcher.supervised import Launch

from launcher.command import Command
from launcher.errors import (
    DownloadError,
    LauncherError,
    ShardCannotStart,
    ShardFailed,
    WebserverCannotStart,
    WebserverFailed,
)
from launcher.processes.model_processes import ModelProcesses, ModelState
from launcher.processes.timeouts import Timeouts


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_day_in_order(launch: Launch, number: int) -> None:
    launch.stop_at("Ready on", number)
    assert launch.serve([shard(launch.folder, 0), shard(launch.folder, 1)]) == 0
    assert journal(launch.folder) == ["router stops", "shard stops", "shard stops"]
    order = ["Starting shard", "Shard ready in", "Starting Webserver", "Router ready in", "Ready on", "Shutting down"]
    found = [next(index for index, line in enumerate(launch.story.lines) if text in line) for text in order]
    assert found == sorted(found)
    ready = next(line for line in launch.story.lines if line.startswith("Ready on"))
    assert f"http://127.0.0.1:{launch.port} after " in ready
    assert all(part in ready for part in ("before the shards", "shard 0", "shard 1", "router"))


def test_the_announcement_comes_when_shards_are_running(launch: Launch) -> None:
    seen: list[int] = []

    launch.on_started = lambda: seen.append(len(launch.running()))
    launch.stop_at("Ready on")
    assert launch.serve() == 0
    assert seen == [1]


def test_a_signal_while_shards_load(launch: Launch) -> None:
    launch.stop_at("Starting shard")
    assert launch.serve([plain("import time; time.sleep(600)", name="shard")]) == 0
    assert not launch.story.has("Starting Webserver")


def test_a_second_signal_kills_at_once(launch: Launch) -> None:
    launch.stop_at("Ready on", signal.SIGINT)
    launch.stop_at("SIGINT: stopping")
    began = time.monotonic()
    stubborn = router(launch.folder, launch.port, on_term="ignore")
    assert launch.serve(router_command=stubborn, graceful_s=600) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 60
    assert journal(launch.folder) == []


def test_one_deadline_for_everything(launch: Launch) -> None:
    launch.stop_at("Ready on")
    stubborn = router(launch.folder, launch.port, on_term="ignore")
    began = time.monotonic()
    assert launch.serve([shard(launch.folder, on_term="ignore")], stubborn, graceful_s=2.0, draining_record_s=0.1) == 0
    assert time.monotonic() - began < 60
    assert launch.story.has("router did not stop in 2 s: killed")
    assert launch.story.has("shard 0 did not stop")
    assert launch.story.has("Waiting for router to finish")


def failing(program: str) -> str:
    return f"import sys\n{program}"


def test_a_shard_that_cannot_start(launch: Launch) -> None:
    record = '{"level": "ERROR", "message": "no such model\\nmore"}'
    bad = shard(
        launch.folder, 1, program=failing(f"print({record!r}); sys.stderr.write('Traceback\\n  why'); sys.exit(3)")
    )
    with pytest.raises(ShardCannotStart, match=r"^shard 1 exited with status 3: no such model$"):
        launch.serve([shard(launch.folder, 0, on_term="ignore"), bad], survivors_s=0.2)
    assert launch.story.has("Shard complete standard error output:\nTraceback\n  why")
    assert launch.story.has("Shard 1 failed to start: exited with status 3")
    assert launch.story.has("Shutting down shards")


def test_without_a_record_the_last_words_are_the_cause(launch: Launch) -> None:
    bad = shard(launch.folder, program="raise ValueError('no such thing')")
    with pytest.raises(ShardCannotStart, match=r"^shard 0 exited with status 1: ValueError: no such thing$"):
        launch.serve([bad])


def test_the_complete_crash_output_is_logged_once(launch: Launch) -> None:
    bad = shard(
        launch.folder, program=failing("sys.stderr.write(''.join(f'line {i}\\n' for i in range(1200))); sys.exit(1)")
    )
    with pytest.raises(ShardCannotStart):
        launch.serve([bad])
    dumped = [line for text in launch.story.lines if "\n" in text for line in text.splitlines()]
    assert [line for line in dumped if line.startswith("line ")] == [f"line {index}" for index in range(1200)]


def test_a_shard_killed_while_serving(launch: Launch) -> None:
    launch.kill_at("Ready on", "shard", 1)
    with pytest.raises(ShardFailed, match=r"^shard 1 was killed by signal 9 \(SIGKILL\)"):
        launch.serve([shard(launch.folder, 0), shard(launch.folder, 1)])
    assert launch.story.has("Shard 1 crashed: was killed by signal 9")
    assert sorted(journal(launch.folder)) == ["router stops", "shard stops"]


@pytest.mark.parametrize("num_shards", [1, 2])
def test_a_router_that_answers_its_last_requests_is_not_told_to_hurry(launch: Launch, num_shards: int) -> None:
    """A second SIGTERM would: the requests that the dead shard has failed would be dropped without their answer."""
    launch.kill_at("Ready on", "shard", 0)
    shards = [shard(launch.folder, rank) for rank in range(num_shards)]
    with pytest.raises(ShardFailed, match="shard 0"):
        launch.serve(shards, router(launch.folder, launch.port, on_term="drain"))
    assert journal(launch.folder).count("router stops") == 1


def test_survivors_that_do_not_listen_are_killed_soon(launch: Launch) -> None:
    launch.kill_at("Ready on", "shard", 0)
    shards = [shard(launch.folder, rank, on_term="ignore") for rank in range(2)]
    stubborn = router(launch.folder, launch.port, on_term="ignore")
    began = time.monotonic()
    with pytest.raises(ShardFailed, match="shard 0"):
        launch.serve(shards, stubborn, graceful_s=600, survivors_s=0.2, failing_router_s=0.2)
    assert time.monotonic() - began < 60


@pytest.mark.parametrize(
    ("first", "second", "cause"),
    [
        ("sys.exit(1)", "os.kill(os.getpid(), 11)", r"^shard 1 .*SIGSEGV"),
        ("sys.exit(LOST_PEER)", "sys.exit(1)", "^shard 1 exited with status 1$"),
        ("sys.exit(LOST_PEER)", "os.kill(os.getpid(), 9)", r"^shard 1 .*SIGKILL"),
    ],
    ids=["killed-before-failed", "failed-before-lost-a-peer", "killed-before-lost-a-peer"],
)
def test_of_several_dead_shards_the_first_cause_is_named(launch: Launch, first: str, second: str, cause: str) -> None:
    head = "import os, sys; from wire.exit_status import LOST_PEER; "
    children = [plain(head + last, name="shard", rank=rank) for rank, last in enumerate([first, second])]

    def both_dead() -> None:
        deadline = time.monotonic() + 60
        while any(p.status() != psutil.STATUS_ZOMBIE for p in psutil.Process().children() if p.pid in pids()):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def pids() -> set[int]:
        assert launch.supervisor is not None
        return {child.pid for child in launch.supervisor.model.children}

    launch.on_started = both_dead
    with pytest.raises(ShardCannotStart, match=cause):
        launch.serve(children)


def test_a_router_that_ends(launch: Launch) -> None:
    launch.kill_at("Ready on", "router")
    with pytest.raises(WebserverFailed, match=r"^router was killed by signal 9"):
        launch.serve()
    assert launch.story.has("Webserver Crashed")
    assert journal(launch.folder) == ["shard stops"]


def test_a_router_that_ends_well_is_a_failure_too(launch: Launch) -> None:
    with pytest.raises(WebserverFailed, match="status 0"):
        launch.serve(router_command=router(launch.folder, launch.port, program="pass"))


def test_a_router_that_does_not_exist(launch: Launch) -> None:
    missing = Command(name="router", argv=("/no/such/router",), env={}, url=f"http://127.0.0.1:{launch.port}")
    with pytest.raises(WebserverCannotStart, match="127"):
        launch.serve(router_command=missing)
    assert launch.story.has("/no/such/router: No such file or directory")


def test_a_shard_that_dies_in_the_drain_makes_the_stop_a_failure(launch: Launch) -> None:
    launch.stop_at("Ready on")
    launch.kill_at("SIGTERM: stopping", "shard", 0)
    with pytest.raises(ShardFailed, match="shard 0 was killed by signal 9"):
        launch.serve(router_command=router(launch.folder, launch.port, on_term="drain"))


def test_of_several_shards_that_die_in_the_drain_the_first_cause_is_named(launch: Launch) -> None:
    launch.stop_at("Ready on")
    launch.kill_at("SIGTERM: stopping", "shard", 0, signal.SIGUSR2)  # it says that it has lost a peer
    launch.kill_at("SIGTERM: stopping", "shard", 1)
    slow = router(launch.folder, launch.port, on_term="drain")
    with pytest.raises(ShardFailed, match="shard 1 was killed by signal 9"):
        launch.serve([shard(launch.folder, 0), shard(launch.folder, 1)], slow)
    assert launch.story.has("Shard 1 crashed")


def test_who_signals_everybody_is_told_why_requests_were_lost(launch: Launch) -> None:
    """Service managers do; the router then fails for want of shards."""
    launch.stop_at("Ready on")
    launch.kill_at("SIGTERM: stopping", "shard", 0, signal.SIGTERM)
    with pytest.raises(ShardFailed, match=r"shard 0 was stopped before the last requests .*KillMode=mixed"):
        launch.serve(router_command=router(launch.folder, launch.port, on_term="fail"))
    assert not launch.story.has("Webserver Crashed")


@pytest.mark.parametrize(("on_term", "end"), [("crash", "was killed by signal 11"), ("fail", "exited with status 3")])
def test_a_router_that_dies_in_the_drain_makes_the_stop_a_failure(launch: Launch, on_term: str, end: str) -> None:
    launch.stop_at("Ready on")
    with pytest.raises(WebserverFailed, match=f"router {end}"):
        launch.serve(router_command=router(launch.folder, launch.port, on_term=on_term))
    assert launch.story.has("Webserver Crashed")
    assert journal(launch.folder)[-1] == "shard stops"


def test_start_up_time_out(launch: Launch) -> None:
    stuck = plain('import time; print(\'{"level": "INFO", "message": "loading 3/9"}\', flush=True); time.sleep(600)')
    stuck = Command(name="shard", rank=0, argv=stuck.argv, env=stuck.env, socket=str(launch.folder / "never"))
    launch.hurry_at("its last message: loading 3/9", 0.0)
    with pytest.raises(ShardCannotStart, match=r"shard 0 was not ready \S+ s after.*last message: loading 3/9"):
        launch.serve([stuck], waiting_record_s=0.3)
    assert launch.story.has("Waiting for shard to be ready... (phase: starting for ")
    assert launch.story.has(" s; its last message: loading 3/9)")


def test_a_download_does_not_count_as_start_up(launch: Launch) -> None:
    supervisor = launch.supervise(startup_s=100.0)
    assert supervisor.download(plain("import time; time.sleep(0.01)")) is None
    assert supervisor._download_s >= 0.01
    model = supervisor.model
    for download_s, is_late in ((0.0, True), (50.0, False)):
        began_at = time.monotonic() - 110.0
        life = model.load(
            [], None, began_at=began_at, download_s=download_s, on_started=lambda: None, on_ready=lambda *_: None
        )
        next(life)
        assert model._is_out_of_time() == is_late
        assert model.state is ModelState.READY


def test_a_model_is_loaded_again_after_its_end(launch: Launch) -> None:
    """One thread runs it: each way of going on is asked for its next step."""
    model = ModelProcesses(launch.guard, Timeouts(graceful_s=20.0))
    states = [model.state]

    def drive(way: Iterator[float], until: ModelState) -> None:
        for pause_s in way:
            states.append(model.state)
            if model.state is until:
                return
            time.sleep(min(pause_s, 0.01))
        states.append(model.state)

    def load() -> Iterator[float]:
        commands = [shard(launch.folder)], router(launch.folder, launch.port)
        return model.load(
            *commands, began_at=time.monotonic(), on_started=lambda: None, on_ready=lambda url, _: urls.append(url)
        )

    urls: list[str] = []
    drive(load(), ModelState.READY)
    drive(model.unload("it is idle"), ModelState.UNLOADED)
    assert journal(launch.folder) == ["router stops", "shard stops"]
    drive(load(), ModelState.READY)
    assert urls == [f"http://127.0.0.1:{launch.port}"] * 2
    order = [state for state, before in zip(states[1:], states[:-1], strict=True) if state is not before]
    life = [ModelState.LOADING, ModelState.READY]
    assert order == [*life, ModelState.UNLOADING, ModelState.UNLOADED, *life]
    model.kill()
    with pytest.raises(ShardCannotStart, match="SIGKILL"):
        drive(
            model.load(
                [plain("import os; os.kill(os.getpid(), 9)", name="shard", rank=0)],
                None,
                began_at=time.monotonic(),
                on_started=lambda: None,
                on_ready=lambda *_: None,
            ),
            ModelState.READY,
        )
    assert model.state is ModelState.FAILED


def test_download(launch: Launch) -> None:
    assert launch.supervise().download(plain("pass")) is None


def test_download_that_fails(launch: Launch) -> None:
    program = 'import sys; print(\'{"level": "ERROR", "message": "no network"}\'); sys.exit("why")'
    with pytest.raises(DownloadError, match="download exited with status 1: no network"):
        launch.supervise().download(plain(program))
    assert launch.story.has("Download complete standard error output:\nwhy")


def test_download_that_is_interrupted(launch: Launch) -> None:
    launch.story.at("download is running", lambda: launch.signals.notify(signal.SIGTERM))
    program = 'import time; print(\'{"level": "INFO", "message": "download is running"}\', flush=True); time.sleep(600)'
    assert launch.supervise().download(plain(program)) == 0


def test_an_error_of_ours_is_not_swallowed(launch: Launch) -> None:
    def fail() -> None:
        raise RuntimeError("ours")

    launch.on_started = fail
    try:
        with pytest.raises(RuntimeError, match="ours"):
            launch.serve()
    finally:
        assert launch.supervisor is not None
        launch.supervisor.kill_all()


def test_every_end_is_a_launcher_error() -> None:
    for kind in (DownloadError, ShardCannotStart, ShardFailed, WebserverCannotStart, WebserverFailed):
        assert issubclass(kind, LauncherError)
