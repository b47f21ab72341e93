"""Records of loading, one a tenth, none for fast loads."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(__name__)

# Seconds between two records, and from the start to the first.
EVERY_S = 1.0


class LoadProgress:
    """Called with loaded layers; terminals draw `progress`."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._tenth = 0
        self._has_spoken = False

    def __call__(self, done: int, total: int) -> None:
        tenth = 10 * done // max(total, 1)
        now = time.monotonic()
        is_end = done >= total and self._has_spoken
        if tenth > self._tenth and (is_end or now - self._last >= EVERY_S):
            self._last, self._tenth, self._has_spoken = now, tenth, True
            percent = 100 * done // max(total, 1)
            extra = {"progress": f"{done}/{total}"}
            logger.info("Loading weights: layer %d of %d (%d %%)", done, total, percent, extra=extra)
