"""`python -m model_server`."""

from __future__ import annotations

import sys

from tercet import model_server as main

if __name__ == "__main__":
    sys.exit(main())
