"""Compares types with transformers: `python -m differential [TYPE...]`, in `tests`."""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from differential.compare import base_fields, compare, with_change
from differential.fields import changes
from differential.known import TYPES, is_known


def main() -> int:
    """1 where an answer differs and no reason is known."""
    counts: Counter[str] = Counter()
    failed = 0
    for model_type in [one for one in sys.argv[1:] if one != "-v"] or TYPES:
        base = base_fields(model_type)
        with tempfile.TemporaryDirectory() as folder:
            for name, value in changes(model_type, base):
                for form, outcome in compare(with_change(base, name, value), Path(folder) / "m").items():
                    counts[outcome.kind] += 1
                    line = f"{model_type} {name}={value!r} {form}: {outcome.kind} {outcome.detail}"
                    if outcome.kind in ("different", "crashed") and not is_known(model_type, name):
                        failed += 1
                        print("FAIL", line, flush=True)
                    elif "-v" in sys.argv:
                        print(line, flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in sorted(counts.items())))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
