"""What the environment says of the C++ operators."""

from __future__ import annotations

import os

from model_server.cpp.instruction_sets import SETS
from model_server.errors import StartupError

# 0: torch's operators alone. 1: the C++ operators for all matrices, also where oneDNN was measured to be faster.
SWITCH = "TERCET_NATIVE"
# The best instruction set that may be used.
CAP = "TERCET_INSTRUCTION_SET"


def are_switched_off() -> bool:
    return os.environ.get(SWITCH) == "0"


def are_measured() -> bool:
    """Whether oneDNN may get a matrix where it measures faster."""
    return os.environ.get(SWITCH) != "1"


def instruction_set_cap() -> str | None:
    """Return the set that is asked for, if any.

    Raises:
        StartupError: There is no such set.
    """
    cap = os.environ.get(CAP)
    if cap is None or cap in SETS:
        return cap
    raise StartupError(f"{CAP}={cap} is unknown; choose one of {', '.join(SETS)}, or unset it")
