"""What the libraries that quantize models write, read by this project; `make test-quantizers`.

Each library has an environment of its own below `build/quantizers`, of the exact versions in `requirements`, with the
torch of `constraints.txt` for CPUs, which they share. There its writer in `writers` makes tiny checkpoints of every
option that it offers on a CPU, and leaves the logits and greedy tokens of the library's own reading beside each
(`writers/tiny.py`). Here each is read: equal, or refused in words. After each library stands what was not equal, and
why. Libraries named on the command line are the only ones. One is skipped where the package index cannot be reached or
does not have it; the status is 0 if one at least was tried and all that were tried are as they should be.

autoawq has the last transformers that it works with. On a CPU it writes 4 bits with zero points; gptqmodel and
auto-round write the other forms of its format.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from quantizers.compare import compare
from quantizers.environments import HERE, WORK, BrokenError, UnavailableError, bounded, made, of_library
from quantizers.outcomes import REFUSED, Case, Outcome, ending, of_writer, table

WRITE_LIMIT_S = 3600.0


def main(libraries: list[str]) -> int:
    if unknown := set(libraries) - REFUSED.keys():
        sys.exit(f"error: no libraries {', '.join(sorted(unknown))}; there are {', '.join(REFUSED)}")
    outcomes = []
    for library in libraries or REFUSED:
        print(f"\n=== {library}", flush=True)
        began = time.monotonic()
        outcomes.append(tried(library))
        print(f"{table(outcomes[-1])}\n{time.monotonic() - began:.0f} s", flush=True)
    status, line = ending(outcomes)
    print(f"\n{line}", flush=True)
    return status


def tried(
    library: str,
    installed: Callable[[str], Path] = lambda library: made(of_library(library)),
    write: Callable[[Path, str, Path], int] | None = None,
    read: Callable[[Path], Case] = compare,
) -> Outcome:
    """Installs, writes and reads."""
    try:
        python = installed(library)
    except UnavailableError as error:
        return Outcome(library, skipped=str(error))
    except BrokenError as error:
        return Outcome(library, fault=str(error))
    folder = WORK / "out" / library
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    status = (write or written)(python, library, folder)
    return of_writer(library, status, [read(case) for case in sorted(folder.iterdir())])


def written(python: Path, library: str, folder: Path) -> int:
    """Runs a library's writer; the status of one that takes too long is 124."""
    command = [str(python), str(HERE / "writers" / f"{library}_files.py"), str(folder)]
    with (WORK / f"{library}.log").open("w") as log:
        try:
            status, _ = bounded(command, WRITE_LIMIT_S, env=environment(), cwd=WORK, stdout=log, stderr=log)
        except subprocess.TimeoutExpired:
            status = 124
    return status


def environment() -> dict[str, str]:
    """Nothing is downloaded, and nothing compiled: both take minutes."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    return kept | {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
