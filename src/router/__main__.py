"""`python -m router`, and the console scripts `router` and `text-generation-router`."""

from router.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
