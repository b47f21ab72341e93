"""Runs a command of the project with the stand-in for a GPU: run.py FOLDER COMMAND..., FOLDER made by prepare.py.

Environment, beside that of libraries/runtime.c and streams.c:
FAKE_CARD_KERNELS=numbers  kernels and operators compute, on the CPU (default)
FAKE_CARD_KERNELS=null     kernels do nothing, and ids are made up: large models, launches and waits of a step
FAKE_CARD_KERNELS=none     nothing of Python is changed
FAKE_CARD_REPORT=FOLDER    each process leaves a JSON file there: faults, errors, waits, kernels
FAKE_CARD_COVERAGE=FILE    each process leaves its coverage beside FILE
FAKE_CARD_PROCESSORS=N     multiprocessors: 4 where kernels compute, else an H100's 132
FAKE_CARD_HOST_MIB=N       memory of each process beside the card's, 6144 by default
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def environment(folder: Path) -> dict[str, str]:
    """That of the command."""
    environ = dict(os.environ)

    def prepend(name: str, *values: Path) -> None:
        environ[name] = os.pathsep.join([*map(str, values), *filter(None, [environ.get(name)])])

    prepend("PATH", folder / "venv/bin", HERE / "bin")
    prepend("LD_LIBRARY_PATH", folder / "lib")
    prepend("PYTHONPATH", HERE / "python", HERE, ROOT / "src", ROOT / "tests", ROOT)
    environ["TRITON_LIBCUDA_PATH"] = str(folder / "lib")
    environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton-cache"))
    environ.setdefault("OMP_NUM_THREADS", "1")
    if environ.setdefault("FAKE_CARD_KERNELS", "numbers") == "numbers":
        environ.setdefault("FAKE_CARD_PROCESSORS", "4")
    if environ.get("FAKE_CARD_COVERAGE"):
        from device_lines import device_lines

        environ["FAKE_CARD_COVERED"] = ",".join(map(str, device_lines()))
    return environ


def main() -> None:
    if len(sys.argv) < 3:
        raise SystemExit(__doc__)
    # Device memory is shared memory, which this does not count: FAKE_CARD_MIB limits it.
    limit = int(os.environ.get("FAKE_CARD_HOST_MIB", "6144")) << 20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    environ = environment(Path(sys.argv[1]).resolve())
    os.execvpe(sys.argv[2], sys.argv[2:], environ)


if __name__ == "__main__":
    main()
