"""`python -m model_server.cpp`: compile the operators now, for an image or before a first start."""

from __future__ import annotations

import sys

from model_server.cpp.compile import CompileError, compiled


def main() -> int:
    try:
        sys.stdout.write(f"{compiled()}\n")
    except CompileError as error:
        sys.stderr.write(f"No C++ operators: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
