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
    lines = [
        f"C++ operators were built for: {', '.join(found.built) or 'no instruction set'}",
        f"This CPU has: {', '.join(found.supported) or 'none of them'}",
        *found.faults,
        f"Used: {found.chosen or 'none'}",
    ]
    lack = found.lack()
    if lack is not None:
        lines.append(f"No C++ operators, torch's are used: {lack}")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if found.chosen is not None else 1


if __name__ == "__main__":
    sys.exit(main())
