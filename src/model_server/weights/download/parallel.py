"""Calls on a few daemon threads; the first failure is raised at once."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable

_GOODBYE_S = 0.3


def in_parallel(jobs: Iterable[Callable[[], None]], num_threads: int, stop: threading.Event) -> None:
    """Run all jobs; `stop` is set, and no more begun, on a failure or interrupt."""
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    num_jobs = 0
    for job in jobs:
        waiting.put(job)
        num_jobs += 1

    def work() -> None:
        while not stop.is_set():
            try:
                job = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                job()
            except BaseException as error:
                ended.put(error)
                return
            ended.put(None)

    threads = [threading.Thread(target=work, name=f"download-{n}", daemon=True) for n in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(num_jobs):
            error = ended.get()
            if error is not None:
                raise error
    except BaseException:
        stop.set()
        for thread in threads:
            thread.join(_GOODBYE_S / num_threads)
        raise
