"""`python -m router`."""

from __future__ import annotations

import sys

from tercet import router as main

if __name__ == "__main__":
    sys.exit(main())
