"""How far a download is: a bar every second on a terminal, else a record every 10 s, and one a file."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from pathlib import Path

logger = logging.getLogger(__name__)

RECORD_EVERY_S = 10.0
BAR_EVERY_S = 1.0
# The rate is that of the last seconds: what a network did an hour ago says nothing.
_WINDOW_S = 10.0
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB", "EiB")


def interval(with_bars: bool) -> float:
    """Return seconds between records; bars move more often."""
    return BAR_EVERY_S if with_bars else RECORD_EVERY_S


class DownloadProgress:
    """Writes records inside its context; methods are for any thread."""

    def __init__(self, num_files: int, total_bytes: int, *, every_s: float = RECORD_EVERY_S) -> None:
        self._num_files, self._total = num_files, total_bytes
        self._every_s = every_s
        self._files_done = 0
        self._done = 0
        self._received = 0
        self._samples = deque([(time.monotonic(), 0)])
        self._lock, self._files_lock = threading.Lock(), threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="download-progress", daemon=True)

    def __enter__(self) -> DownloadProgress:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._end.set()
        self._thread.join(1.0)

    def received(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._received += num_bytes

    def found(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes

    def file_done(self, path: Path, seconds: float) -> None:
        with self._files_lock:  # so that the last record is the last one
            self._files_done += 1
            logger.info("Downloaded %s in %.1f s.", path, seconds)
            extra = {"progress": "1000/1000", "bar": ""} if self._files_done == self._num_files else None
            logger.info("Download: [%d/%d] -- ETA: %s", self._files_done, self._num_files, self._eta(), extra=extra)

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            with self._lock:
                permille = min(1000 * max(self._done, 0) // max(self._total, 1), 999)
            text = self._text()
            logger.info("Downloading: %s", text, extra={"progress": f"{permille}/1000", "bar": text})

    def _text(self) -> str:
        with self._lock:
            done = self._done
        percent = 100 * done // max(self._total, 1)
        return f"{size(done)} of {size(self._total)} ({percent} %), {size(round(self._rate()))}/s, {self._eta()} left"

    def _rate(self) -> float:
        """Bytes per second."""
        now = time.monotonic()
        with self._lock:
            self._samples.append((now, self._received))
            while len(self._samples) > 2 and self._samples[1][0] <= now - _WINDOW_S:
                self._samples.popleft()
            then, before = self._samples[0]
            return max(self._received - before, 0) / max(now - then, 1e-3)

    def _eta(self) -> str:
        with self._lock:
            left = self._total - self._done
        if left <= 0:
            return "0 s"
        rate = self._rate()
        return f"{left / rate:.0f} s" if rate >= 1 else "unknown"


def size(num_bytes: int) -> str:
    """`1.5 GiB`."""
    value, unit = float(num_bytes), "B"
    for larger in _UNITS:
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
