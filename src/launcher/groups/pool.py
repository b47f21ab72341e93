"""Pool: which models are loaded, of those that are wanted; a state machine that waits for nothing.

unloaded ─▶ loading ─▶ loaded ─▶ unloading ─▶ unloaded; a failed start is tried again later.

At most one model starts at a time. Room for it is made by unloading what is idle, least recently used first. A model is
unloaded only after the front has agreed to send it nothing more, so that no request meets a model that goes.
"""
# A model with batches is not idle, but makes room for requests; batches load their model where that takes no other's
# room.

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from launcher.processes.model_processes import ModelState

LEAST_LOADED_S = 10.0
"""A model that has been loaded for less is not unloaded for another one."""
PATIENCE_S = 10.0
"""A model that has waited longer for room gets that of a model with requests, which ends them first."""
_RETRY_S, _MOST_RETRY_S = 10.0, 300.0
_STEADY_S = 60.0
"""A model that has been loaded for so long starts at once after a crash."""

Clock = Callable[[], float]


class Processes(Protocol):
    """The processes of one model."""

    state: ModelState
    error: str

    def start(self) -> None: ...

    def stop(self, why: str) -> None: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bounds:
    """What all loaded models may take together."""

    memory: int
    """Bytes."""
    models: int | None = None


@dataclasses.dataclass
class Member:
    """A model, and what the pool knows of it."""

    name: str
    processes: Processes
    memory: int
    preload: bool = False
    keep_alive_s: float | None = None
    """None: never unloaded for being idle."""

    state: ModelState = ModelState.UNLOADED
    since: float = 0.0
    """When the state began, as the others by the pool's clock."""
    started_at: float = 0.0
    took_s: float = 0.0
    """Of the last start that succeeded."""
    error: str = ""
    num_loaded: int = 0
    """Starts that succeeded, altogether."""
    num_failed: int = 0
    was_ready: bool = False
    """Since its last start."""
    in_a_row: int = 0
    """Failures since it was last well for long."""
    retry_at: float = -math.inf
    is_wanted: bool = False
    """By an operator, or at the start."""
    num_active: int = 0
    num_waiting: int = 0
    """Requests, as the front last said."""
    used_at: float = -math.inf
    waiting_since: float = math.inf
    has_batches: bool = False
    """Batches that have not ended."""
    is_held: bool = False
    """Its batches wait, as an operator has unloaded it."""
    is_released: bool = False
    """The front has been asked to send nothing more."""
    is_let_go: bool = False
    """The front sends nothing more."""
    must_go: bool = False
    """An operator's wish, whatever runs."""

    @property
    def takes_room(self) -> bool:
        return self.state in (ModelState.LOADING, ModelState.READY, ModelState.UNLOADING)


class Pool:
    """Decides by `step` what starts and what stops; `ask_release` asks the front to let a model go."""

    def __init__(
        self,
        members: Sequence[Member],
        bounds: Bounds,
        ask_release: Callable[[str, bool], None],
        *,
        autoload: bool = True,
        clock: Clock = time.monotonic,
    ) -> None:
        """Begin with nothing loaded.

        Args:
            ask_release: Takes a model's name, and whether its requests may end first; `released` or `kept` answers.
            autoload: Whether a waiting request loads its model.
        """
        self.members = {member.name: member for member in members}
        self._bounds, self._ask_release, self._autoload, self._clock = bounds, ask_release, autoload, clock
        now = clock()
        for member in members:
            member.since = now
            if member.preload:
                self._want(member)

    # What the front and operators say

    def report(self, name: str, num_active: int, num_waiting: int, idle_s: float) -> None:
        """Take note of a model's requests."""
        member, now = self.members[name], self._clock()
        if not num_waiting and not member.is_wanted:
            member.waiting_since = math.inf
        elif num_waiting and math.isinf(member.waiting_since):
            member.waiting_since = now
        member.num_active, member.num_waiting = num_active, num_waiting
        member.used_at = now if num_active else max(member.used_at, now - idle_s)

    def report_batches(self, name: str, *, has_batches: bool) -> None:
        """Take note of whether a model has batches that have not ended."""
        member = self.members[name]
        member.has_batches = has_batches
        if has_batches:
            member.used_at = self._clock()

    def released(self, name: str) -> None:
        """The front sends a model nothing more, and nothing runs there."""
        member = self.members[name]
        if member.is_released:
            member.is_let_go = True

    def kept(self, name: str) -> None:
        """The front does not let a model go: it has requests."""
        self.members[name].is_released = False

    def load(self, name: str) -> None:
        """Start a model whether or not requests wait."""
        member = self.members[name]
        member.retry_at = -math.inf
        member.must_go = False
        if member.state is not ModelState.READY or member.is_released:
            self._want(member)

    def unload(self, name: str) -> None:
        """Stop a model as soon as its running requests have ended."""
        member = self.members[name]
        member.is_wanted = False
        member.is_held = True
        member.must_go = member.takes_room

    # What follows

    def step(self) -> None:
        """Take note of what has happened, then start or stop."""
        now = self._clock()
        for member in self.members.values():
            if member.processes.state is not member.state:
                self._changed(member, now)
        for member in self.members.values():
            if member.state is ModelState.READY:
                self._stop_if_due(member, now)
            elif member.state is ModelState.LOADING and member.must_go:
                member.processes.stop(f"{member.name} is unloaded")
        self._start_next(now)

    @property
    def is_well(self) -> bool:
        """Whether each model that is loaded at the start is, or has been since its last failure."""
        return all(
            member.num_loaded and not member.is_wanted and member.state is not ModelState.FAILED
            for member in self.members.values()
            if member.preload
        )

    def _want(self, member: Member) -> None:
        member.is_wanted = True
        if math.isinf(member.waiting_since):
            member.waiting_since = self._clock()

    def _changed(self, member: Member, now: float) -> None:
        before, member.state = member.state, member.processes.state
        if before is ModelState.READY and now - member.since >= _STEADY_S:
            member.in_a_row = 0
        member.since = now
        if member.state is ModelState.READY:
            member.is_held = False
            member.took_s = now - member.started_at
            member.num_loaded += 1
            member.was_ready = True
            member.used_at = now
            member.is_wanted = False
            member.waiting_since = math.inf
            member.error = ""
        elif member.state is ModelState.UNLOADING:
            member.must_go = False
        elif member.state in (ModelState.UNLOADED, ModelState.FAILED):
            member.is_released = member.is_let_go = member.must_go = False
            member.num_active = 0
        if member.state is ModelState.FAILED:
            member.error = member.processes.error
            member.num_failed += not member.was_ready
            # The first start after a crash comes at once.
            power = member.in_a_row - member.was_ready
            member.retry_at = now + (0.0 if power < 0 else min(_RETRY_S * 2 ** min(power, 30), _MOST_RETRY_S))
            member.in_a_row += 1
            if member.preload:
                self._want(member)
            else:
                member.is_wanted = False

    def _stop_if_due(self, member: Member, now: float) -> None:
        if member.is_let_go:
            member.processes.stop(f"{member.name} is unloaded")
        elif member.must_go:
            self._release(member, may_wait=True)
        elif not member.is_released and now >= self._idle_end(member):
            self._release(member, may_wait=False)

    def _idle_end(self, member: Member) -> float:
        """Return when a model has been idle for long enough."""
        if member.keep_alive_s is None or not self._is_idle(member):
            return math.inf
        return max(member.used_at, member.since) + member.keep_alive_s

    def _release(self, member: Member, *, may_wait: bool) -> None:
        if not member.is_released or may_wait:
            member.is_released = True
            self._ask_release(member.name, may_wait)
        member.must_go = False

    @staticmethod
    def _is_idle(member: Member) -> bool:
        return not member.num_active and not member.num_waiting and not member.has_batches

    def _start_next(self, now: float) -> None:
        if any(member.state is ModelState.LOADING for member in self.members.values()):
            return
        waiting = [member for member in self.members.values() if self._may_start(member, now)]
        if not waiting:
            return
        first = min(waiting, key=lambda member: member.waiting_since)
        if self._has_room(first):
            first.started_at = now
            first.was_ready = False
            first.processes.start()
            self._changed(first, now)
            return
        if not self._is_asked_for(first):
            return  # batches wait until there is room
        going = [one for one in self.members.values() if one.is_released or one.state is ModelState.UNLOADING]
        if self._has_room(first, without=going):
            return
        for victim in self._victims(first, now):
            going.append(victim)
            self._release(victim, may_wait=bool(victim.num_active))
            if self._has_room(first, without=going):
                return

    def _may_start(self, member: Member, now: float) -> bool:
        has_batches = self._autoload and member.has_batches and not member.is_held
        is_stopped = member.state in (ModelState.UNLOADED, ModelState.FAILED)
        return (self._is_asked_for(member) or has_batches) and is_stopped and now >= member.retry_at

    def _is_asked_for(self, member: Member) -> bool:
        return member.is_wanted or (self._autoload and member.num_waiting > 0)

    def _victims(self, first: Member, now: float) -> list[Member]:
        """Return the models whose room may be taken, in that order; none unless they make enough of it."""
        loaded = [
            one
            for one in self.members.values()
            if one.state is ModelState.READY and not one.is_released and now - one.since >= LEAST_LOADED_S
        ]
        idle = sorted(filter(self._is_idle, loaded), key=lambda one: (one.preload, one.used_at))
        busy = sorted((one for one in loaded if one not in idle), key=lambda one: one.since)
        in_batches = [one for one in busy if not one.num_active and not one.num_waiting]
        with_clients = [one for one in busy if one not in in_batches]
        found = [*idle, *in_batches, *(with_clients if now - first.waiting_since >= PATIENCE_S else [])]
        going = [one for one in self.members.values() if one.is_released or one.state is ModelState.UNLOADING]
        return found if self._has_room(first, without=[*going, *found]) else []

    def _has_room(self, first: Member, *, without: Iterable[Member] = ()) -> bool:
        gone = {one.name for one in without}
        there = [one for one in self.members.values() if one.takes_room and one.name not in gone]
        if self._bounds.models is not None and len(there) >= self._bounds.models:
            return False
        return sum(one.memory for one in there) + first.memory <= self._bounds.memory
