"""`python -m docs.generate` writes docs/reference, the tables of the migration guides and the README's figures.

With `--check` it only says what is stale, with status 1.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.generate.figures import readme
from docs.generate.pages import REFERENCE, pages
from docs.generate.word_tables import DOCS, guides


def main() -> int:
    wanted = {REFERENCE / name: text for name, text in pages().items()} | dict(guides()) | dict(readme())
    stale = [path for path, text in wanted.items() if _committed(path) != text]
    is_check = "--check" in sys.argv[1:]
    for path in stale:
        name = path.relative_to(DOCS.parent)
        if not is_check:
            path.parent.mkdir(exist_ok=True)
            path.write_text(wanted[path])
        print(f"{name} is stale: make reference" if is_check else name)
    return 1 if stale and is_check else 0


def _committed(path: Path) -> str | None:
    return path.read_text() if path.is_file() else None


if __name__ == "__main__":
    sys.exit(main())
