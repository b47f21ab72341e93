"""`python -m router.front`, as the launcher starts it for several models."""

from __future__ import annotations

import sys

from router.front.cli import main

if __name__ == "__main__":
    sys.exit(main())
