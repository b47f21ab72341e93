"""`python -m docs.generate` writes docs/reference; with `--check` it only says what is stale, with status 1."""

from __future__ import annotations

import sys

from docs.generate.pages import REFERENCE, pages


def main() -> int:
    wanted = pages()
    stale = [name for name, text in wanted.items() if _committed(name) != text]
    if "--check" not in sys.argv[1:]:
        REFERENCE.mkdir(exist_ok=True)
        for name in stale:
            (REFERENCE / name).write_text(wanted[name])
            print(f"docs/reference/{name}")
        return 0
    for name in stale:
        print(f"docs/reference/{name} is stale: make reference")
    return 1 if stale else 0


def _committed(name: str) -> str | None:
    path = REFERENCE / name
    return path.read_text() if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
