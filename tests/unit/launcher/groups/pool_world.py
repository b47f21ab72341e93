"""Models, clients and the front beside a pool, by a clock that only tests move."""

from __future__ import annotations

import random
from dataclasses import dataclass

from launcher.groups.pool import Bounds, Member, Pool
from launcher.processes.model_processes import ModelState


@dataclass
class FakeProcesses:
    """Starts and stops take as long as the test says."""

    world: World
    start_s: float = 4.0
    stop_s: float = 1.0
    fails: bool = False
    state: ModelState = ModelState.UNLOADED
    error: str = ""
    due: float = 0.0
    num_stops: int = 0

    def start(self) -> None:
        assert self.state in (ModelState.UNLOADED, ModelState.FAILED)
        self.state, self.due = ModelState.LOADING, self.world.now + self.start_s

    def stop(self, why: str) -> None:
        if self.state in (ModelState.LOADING, ModelState.READY):
            self.num_stops += 1
            self.state, self.due = ModelState.UNLOADING, self.world.now + self.stop_s

    def crash(self) -> None:
        self.state, self.error = ModelState.FAILED, "killed"

    def advance(self) -> None:
        if self.world.now < self.due:
            return
        if self.state is ModelState.LOADING:
            self.state = ModelState.FAILED if self.fails else ModelState.READY
            self.error = "damaged" if self.fails else ""
        elif self.state is ModelState.UNLOADING:
            self.state = ModelState.UNLOADED


class World:
    """A pool with its front: requests wait for their model, run for a while, and end."""

    def __init__(
        self,
        memories: dict[str, int],
        *,
        memory: int = 100,
        models: int | None = None,
        autoload: bool = True,
        **members: dict[str, object],
    ) -> None:
        self.now = 1000.0
        self.processes = {name: FakeProcesses(self) for name in memories}
        self.running: dict[str, list[float]] = {name: [] for name in memories}
        self.waiting: dict[str, list[float]] = {name: [] for name in memories}
        """Each request's seconds of work."""
        self.used_at = dict.fromkeys(memories, -1e9)
        self.closed: set[str] = set()
        self.batches: set[str] = set()
        """Models with batches that have not ended."""
        self.num_answered = 0
        made = [
            Member(name=name, processes=self.processes[name], memory=size, **members.get(name, {}))  # type: ignore[arg-type]
            for name, size in memories.items()
        ]
        self.pool = Pool(
            made, Bounds(memory=memory, models=models), self._release, autoload=autoload, clock=lambda: self.now
        )

    def request(self, name: str, work_s: float = 0.1) -> None:
        self.waiting[name].append(work_s)

    def states(self) -> dict[str, str]:
        return {name: member.state.value for name, member in self.pool.members.items()}

    def run(self, seconds: float, step_s: float = 0.25) -> None:
        for _ in range(round(seconds / step_s)):
            self.step(step_s)

    def step(self, step_s: float = 0.25) -> None:
        self.now += step_s
        for name, processes in self.processes.items():
            processes.advance()
            self._serve(name, step_s)
            idle_s = 0.0 if self.running[name] else self.now - self.used_at[name]
            self.pool.report(name, len(self.running[name]), len(self.waiting[name]), idle_s)
        for name in [*self.closed]:
            if not self.running[name]:
                self.pool.released(name)
        for name in self.processes:
            self.pool.report_batches(name, has_batches=name in self.batches)
        self.pool.step()
        self.check()

    def _serve(self, name: str, step_s: float) -> None:
        if self.processes[name].state is not ModelState.READY:
            self.closed.discard(name)
        ended = [left for left in self.running[name] if left <= step_s]
        self.num_answered += len(ended)
        if self.running[name] or ended:
            self.used_at[name] = self.now
        self.running[name] = [left - step_s for left in self.running[name] if left > step_s]
        if self.processes[name].state is ModelState.READY and name not in self.closed:
            self.running[name] += self.waiting[name]
            self.waiting[name] = []

    def _release(self, name: str, may_wait: bool) -> None:
        if may_wait or not (self.running[name] or self.waiting[name]):
            self.closed.add(name)
        else:
            self.pool.report(name, len(self.running[name]), len(self.waiting[name]), 0.0)
            self.pool.kept(name)

    def check(self) -> None:
        """What holds at any moment."""
        members = self.pool.members.values()
        there = [one for one in members if one.takes_room]
        assert sum(one.memory for one in there) <= self.pool._bounds.memory
        assert self.pool._bounds.models is None or len(there) <= self.pool._bounds.models
        assert sum(one.state is ModelState.LOADING for one in members) <= 1
        for name, processes in self.processes.items():
            if processes.state is ModelState.UNLOADING:
                assert not self.running[name], f"{name} was stopped with requests"

    def random_step(self, chance: random.Random) -> None:
        """A request, a crash, an operator's wish, or nothing."""
        name = chance.choice([*self.processes])
        kind = chance.random()
        if kind < 0.25:
            self.request(name, chance.choice([0.1, 0.5, 3.0, 20.0]))
        elif kind < 0.255 and self.processes[name].state is ModelState.READY:
            self.processes[name].crash()
            self.running[name] = []
        elif kind < 0.26:
            self.pool.load(name)
        elif kind < 0.265:
            self.pool.unload(name)
        elif kind < 0.28:
            self.batches ^= {name}
        self.step()
