"""`python -m docs.prose [FILE...]` prints the phrases of rules.py in what people read; status 1 if there are any."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from docs.prose.rules import findings
from docs.prose.texts import texts_of, without_code

ROOT = Path(__file__).parents[2]
_READ = (
    "*.md",
    "docs/*.md",
    "tests/**/*.md",
    "benchmarks/**/README.md",
    "demo_model/*.md",
    "deploy/**/*.md",
    "examples/*.md",
    "examples/*.py",
    "docker/*.py",
    "docs/generate/*.py",
    "environment/*.py",
    "src/**/*.html",
    "src/**/*.py",
)
_LEFT_OUT = ("CHANGELOG.md", "docs/models.md", "src/wire/v3")


def files() -> list[Path]:
    found = (path for pattern in _READ for path in ROOT.glob(pattern))
    return sorted(path for path in found if not str(path.relative_to(ROOT)).startswith(_LEFT_OUT))


def complaints(path: Path) -> Iterator[str]:
    """One line for each finding; files of the repository by their path from its root."""
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    for line, text in texts_of(path):
        for found in findings(without_code(text)):
            place = line + text.count("\n", 0, found.offset)
            yield f"{name}:{place}: “{found.words}”: {found.advice}"


def main() -> int:
    given = [Path(name) for name in sys.argv[1:]]
    said = [line for path in given or files() for line in complaints(path)]
    print(*sorted(set(said)), sep="\n", end="\n" if said else "")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main())
