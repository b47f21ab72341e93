"""Measures inside the router for how long its event loop serves nobody, and writes each hold down.

The servers under attack run this file as their `sitecustomize`, so that it imports nothing from beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BEAT_S = 0.005
_NOTED_S = 0.02
_LOOK_S = 0.01
VARIABLE = "LOOP_WATCH_FILE"


@dataclass(frozen=True)
class Hold:
    """A time in which the loop did nothing but one thing."""

    wall_s: float
    used_s: float  # at most, by the loop's thread: what others took of the processor is not in it
    stack: str  # the innermost calls, the last one first; empty if the thread that looks got no turn


def file_in(folder: Path) -> Path:
    """Where the router of the server with this folder writes."""
    return folder / "holds"


def holds_in(file: Path, begin: int) -> tuple[list[Hold], int]:
    """Those written from that byte on, and where the next begin."""
    written = file.read_bytes()[begin:] if file.exists() else b""
    whole = written[: written.rfind(b"\n") + 1]
    return [Hold(**json.loads(line)) for line in whole.splitlines()], begin + len(whole)


class Watch:
    """What the loop's own task and the thread that looks at it share."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._thread = threading.get_ident()
        self._last = time.monotonic()
        self._seen = ""
        self._has_ended = False

    async def beat(self) -> None:
        """Note each hold: by the clock, and by what the loop's thread used, which other processes cannot lengthen."""
        threading.Thread(target=self._look, daemon=True).start()
        try:
            await self._beat()
        finally:
            self._has_ended = True

    async def _beat(self) -> None:
        while True:
            self._last, used = time.monotonic(), time.thread_time()
            await asyncio.sleep(_BEAT_S)
            wall, used = time.monotonic() - self._last - _BEAT_S, time.thread_time() - used
            if wall > _NOTED_S:
                hold = Hold(wall, min(wall, used), self._seen)
                with self._file.open("a") as file:
                    file.write(json.dumps(asdict(hold)) + "\n")
            self._seen = ""

    def _look(self) -> None:
        while not self._has_ended:
            time.sleep(_LOOK_S)
            if not self._seen and time.monotonic() - self._last > _BEAT_S + _NOTED_S:
                self._seen = _stack(sys._current_frames().get(self._thread))


def _stack(frame: Any) -> str:
    """The innermost calls, the last one first."""
    calls: list[str] = []
    while frame is not None and len(calls) < 12:
        code = frame.f_code
        calls.append(f"{code.co_filename.rpartition('/src/')[2]}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return " < ".join(calls)


def _watch_router() -> None:
    import uvloop

    run = uvloop.run

    def watched(main: Coroutine[Any, Any, Any]) -> Any:
        async def both() -> Any:
            beating = asyncio.create_task(Watch(Path(os.environ[VARIABLE])).beat())
            try:
                return await main
            finally:
                beating.cancel()

        return run(both())

    uvloop.run = watched  # type: ignore[assignment]


if VARIABLE in os.environ and "router" in sys.orig_argv:
    _watch_router()
