"""`python -m model_server`."""

from __future__ import annotations

import sys

from model_server.cli import main

if __name__ == "__main__":
    sys.exit(main())
