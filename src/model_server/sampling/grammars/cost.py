"""CPU time of grammars, whose masks all rows of a step wait for.

An ambiguous or large grammar may take seconds within llguidance's bounds, uninterruptibly: expensive work runs in a
thread that can be given up, and only requests with its grammar fail.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

FREE_S = 0.05
"""What one step of a request may take at no charge. Ordinary masks take 0.02 to 0.3 ms, some tens of ms once for each
of a lexer's states on vocabularies of 262,144 tokens."""

MOST_S = 1.0
"""What a request may take beyond that, in all."""

JOB_S = 0.25
"""What it may take at once."""

STEP_S = 0.5
"""Once the masks of a step have taken as long, the others may take no more than FREE_S each."""

SLOW_S = 0.2
"""A step whose masks take longer has an expensive one among them."""

MOST_LEFT_BEHIND = 8
"""While so many threads that were given up still work, grammars of clients fail: one more could be left behind. Others
are worked on all the same, and may leave more."""

_NUM_PROVING = 8
_TAKEN, _TOO_MUCH, _CROWDED_OUT, _FINE = range(4)
"""What a rank finds of a request; the ranks agree on the least."""

_LOOK_EVERY_S = 0.02
# A tenth of the time of others. Not SCHED_IDLE: on a busy machine such a thread has no turn for seconds, in which the
# interpreter waits where it is about to take its lock.
_NICENESS = 10

Agree = Callable[[int], int]
"""The least of the values that the ranks have which sample the same rows: they measure different times, and are to fail
the same rows."""


class GivenUpError(Exception):
    """A job took too much CPU time; its thread keeps what it works on."""


class GuardedThread:
    """Runs a job at a time in a thread that is left behind if it takes too much."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None
        self._left_behind: list[_Worker] = []

    @property
    def is_crowded(self) -> bool:
        """Whether no more threads should be left behind."""
        self._left_behind = [worker for worker in self._left_behind if worker.is_alive]
        return len(self._left_behind) >= MOST_LEFT_BEHIND

    def run(self, work: Callable[[], T], limit_s: float) -> T:
        """Return or raise what `work` does.

        Args:
            work: Holds the interpreter's lock only for moments.
            limit_s: Of CPU time, which other load does not use.

        Raises:
            GivenUpError: It took more.
        """
        if self._worker is None:
            self._worker = _Worker()
        worker = self._worker
        job = _Job(work)
        worker.jobs.put(job)
        while not job.is_done.wait(_LOOK_EVERY_S):
            if job.clock is not None and time.clock_gettime(job.clock) - job.began > limit_s:
                self._worker = None
                self._left_behind.append(worker)
                worker.abandon()
                raise GivenUpError
        if job.error is not None:
            raise job.error
        return job.result  # type: ignore[return-value]


class _Job:
    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.is_done = threading.Event()
        self.clock: int | None = None  # of the thread's CPU time, as soon as it has begun
        self.began = 0.0
        self.result: object = None
        self.error: BaseException | None = None


class _Worker:
    def __init__(self) -> None:
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="grammars", daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def abandon(self) -> None:
        """End the thread behind its job, which hardly keeps others from running."""
        if (thread := self._thread.native_id) is not None:
            lowered = os.getpriority(os.PRIO_PROCESS, thread) + _NICENESS
            os.setpriority(os.PRIO_PROCESS, thread, min(lowered, 19))
        self.jobs.put(None)  # last: a thread that has ended has no priority

    def _work(self) -> None:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        while (job := self.jobs.get()) is not None:
            job.began, job.clock = time.clock_gettime(clock), clock
            try:
                job.result = job.work()
            except BaseException as error:
                job.error = error
            job.is_done.set()
            del job


class SharedLexer:
    """The lexer of all automata of one grammar, which one uses at a time, and all others wait for."""

    is_held = False
    """By a thread of this rank that was given up."""
    is_taken = False
    """On some rank, as all of them know."""


class GrammarCost:
    """One request's time; `is_over`: too much on some rank, and its automaton is not asked again."""

    def __init__(self, guard: GuardedThread, agree: Agree | None, lexer: SharedLexer, *, may_prove: bool) -> None:
        """Start counting.

        Args:
            agree: Between ranks that sample the row, if several.
            lexer: Of its grammar.
            may_prove: Cheap masks vouch for later ones, unless a client wrote the grammar.
        """
        self.may_prove = may_prove
        self.is_over = False
        self.is_crowded_out = False
        """It is over since others took too much, and not this one."""
        self._lexer = lexer
        self.last_s = 0.0
        """What the last step took."""
        self._guard = guard
        self._agree = agree
        self._spent_s = 0.0
        self._num_cheap = 0

    @property
    def is_proven(self) -> bool:
        """Whether the next mask needs no measurement."""
        return self.may_prove and self._num_cheap >= _NUM_PROVING and not self._lexer.is_taken

    @property
    def may_ask(self) -> bool:
        """Whether the automaton answers; on all ranks alike, as a step's rows follow from it."""
        return not (self.is_over or self._lexer.is_taken)

    def doubt(self) -> None:
        """Measure its next masks."""
        self._num_cheap = 0

    def run(self, work: Callable[[], T], default: T) -> T:
        """Return what `work` does at this request's charge, or `default` if it takes too much. Several ranks wait: a
        step's rows follow from it.
        """
        if not self.may_ask:
            return default
        result = self._measured(work, default, JOB_S if self._agree is None else math.inf)
        if self._agree is None:
            self.finalize([self])
        return result

    def run_for_mask(self, work: Callable[[], object], limit_s: float) -> None:
        """Work unless it takes too much; `finalize` comes next."""
        self.last_s = 0.0
        if not self.is_over and self._verdict == _FINE:
            self._measured(work, None, limit_s)

    @staticmethod
    def finalize(costs: Sequence[GrammarCost]) -> None:
        """Agree, behind a step's masks, on requests that took too much, and on lexers that are taken."""
        agree = costs[0]._agree or int
        verdicts = [cost._verdict for cost in costs]
        if agree(min(verdicts)) < _FINE:
            for cost, verdict in zip(costs, verdicts, strict=True):
                agreed = agree(verdict)
                cost.is_over, cost.is_crowded_out = agreed < _FINE, agreed == _CROWDED_OUT
                cost._lexer.is_taken |= agreed == _TAKEN

    @property
    def _verdict(self) -> int:
        """By this rank's clock."""
        if self._lexer.is_held or self._lexer.is_taken:
            return _TAKEN
        if self.is_crowded_out:
            return _CROWDED_OUT
        return _TOO_MUCH if self._spent_s > MOST_S else _FINE

    def _measured(self, work: Callable[[], T], default: T, limit_s: float) -> T:
        if limit_s < math.inf and not self.may_prove and self._guard.is_crowded:
            self.is_crowded_out, self._spent_s = True, math.inf
            return default

        def measured() -> tuple[T, float]:
            began = time.thread_time()
            return work(), time.thread_time() - began

        try:
            result, self.last_s = self._guard.run(measured, limit_s)
        except GivenUpError:
            self.last_s, self._spent_s, self._lexer.is_held = limit_s, math.inf, True
            return default
        if self.last_s <= FREE_S:
            self._num_cheap += 1
        else:
            self._num_cheap = 0
            self._spent_s += self.last_s - FREE_S
        return result
