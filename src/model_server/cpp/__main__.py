"""`python -m model_server.cpp`: which C++ operators were built, and which are used here."""

from __future__ import annotations

import sys

from model_server.cpp.config import instruction_set_cap
from model_server.cpp.instruction_sets import survey
from model_server.errors import StartupError


def main() -> int:
    try:
        found = survey(instruction_set_cap())
    except StartupError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    lack = found.lack()
    lines = [f"No C++ operators, torch's are used: {lack}" if lack else f"C++ operators for {found.chosen} are used"]
    if found.built:
        lines += [
            f"Built for: {', '.join(found.built)}",
            f"This CPU has: {', '.join(found.supported) or 'none of them'}",
        ]
    if found.chosen is not None:
        lines += found.faults
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if found.chosen is not None else 1


if __name__ == "__main__":
    sys.exit(main())
