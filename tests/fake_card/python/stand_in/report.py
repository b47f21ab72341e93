"""What a process with the stand-in card has seen, as a JSON file for those who look from outside."""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from stand_in import operators, queued, triton_kernels
from stand_in.counters import counts, faults

_EVERY_S = 2.0


def content() -> dict[str, Any]:
    """Since the process began."""
    now = counts()
    return {
        "command": sys.argv,
        "order": os.environ.get("FAKE_CARD_ORDER", "late"),
        "faults": faults(now),
        "errors": queued.errors[:6],
        "counters": {counter.name.lower(): number for counter, number in now.items()},
        "waits": dict(queued.waits.most_common()),
        "kernels": dict(triton_kernels.launched.most_common()),
        "kernel_seconds": {name: round(taken, 1) for name, taken in triton_kernels.seconds.most_common()},
        "operators": dict(operators.computed.most_common()),
    }


def begin(folder: Path) -> None:
    """Keep a file up to date, for a process that is killed as well as for one that ends."""
    path = folder / f"{os.getpid()}.json"
    lock = threading.Lock()

    def write() -> None:
        with lock:
            whole = path.with_suffix(".part")
            whole.write_text(json.dumps(content(), indent=1))
            whole.replace(path)

    def write_again() -> None:
        while True:
            time.sleep(_EVERY_S)
            write()

    atexit.register(write)
    threading.Thread(target=write_again, daemon=True).start()
