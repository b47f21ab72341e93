"""`python -m launcher`, and the entry point of the `launcher` command."""

from __future__ import annotations

import sys

from launcher.cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
