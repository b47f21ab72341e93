"""`python -m launcher`."""

from __future__ import annotations

import sys

from tercet import launcher as main

if __name__ == "__main__":
    sys.exit(main())
