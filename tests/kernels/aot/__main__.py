"""`python -m aot`: compile all variants for all targets, print a table, end with 1 if one of them fails."""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import importlib.util
import multiprocessing
import os
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path

from aot import compiler, coverage, report
from aot.compiler import Job, Row
from aot.limits import SHARED_KIB

PACKAGE = "model_server.kernels"
VARIANTS = "aot.variants"


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if all compiled within the limits and no kernel was forgotten."""
    asked = _parser().parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined
    os.environ.setdefault("TRITON_CACHE_DIR", str(asked.cache.resolve()))
    modules = [name for name in _modules(asked.package) if asked.only in name]
    listed = {module: _listed(asked.variants + module.removeprefix(asked.package)) for module in modules}
    forgotten = [f"{module}.{name}" for module in modules for name in coverage.forgotten(module, listed[module])]
    lists = [found for found in listed.values() if found is not None]
    jobs = [job for found in lists for job in compiler.jobs(found, tuple(asked.targets))]
    rows = _worked(jobs, asked.jobs)
    print(report.table(rows))
    for name in forgotten:
        print(f"FAILED {name} is launched, but no variant compiles it")
    report.write(rows, asked.out)
    return 1 if forgotten or any(row.fault for row in rows) else 0


def _worked(jobs: list[Job], processes: int) -> list[Row]:
    """The rows of `jobs`, in order. Triton's compiler ends its process where it meets what it did not expect, and the
    pool with it: what was not done by then is tried again, each job in a pool of its own."""
    done = _attempt(jobs, processes)
    for job in jobs:
        if job not in done:
            done |= _attempt([job], 1)
        if job not in done:
            done[job] = compiler.died(job)
    return [done[job] for job in jobs]


def _attempt(jobs: list[Job], processes: int) -> dict[Job, Row]:
    # Fresh processes: LLVM and torch keep threads, which a fork would lose.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        futures = {job: pool.submit(compiler.work, job) for job in jobs}
        for count, _ in enumerate(concurrent.futures.as_completed(futures.values()), start=1):
            if count % 20 == 0:
                print(f"{count} of {len(jobs)} compiled", flush=True)
    return {job: future.result() for job, future in futures.items() if future.exception() is None}


def _modules(package: str) -> list[str]:
    folder = importlib.import_module(package).__path__
    return [found.name for found in pkgutil.walk_packages(folder, package + ".")]


def _listed(module: str) -> str | None:
    """The module of this name, if there is one."""
    try:
        return None if importlib.util.find_spec(module) is None else module
    except ModuleNotFoundError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aot", description=__doc__)
    parser.add_argument("--package", default=PACKAGE, help="whose files hold the kernels")
    parser.add_argument("--variants", default=VARIANTS, help="whose files, of the same names, list what is compiled")
    parser.add_argument("--only", default="", help="only files whose name contains this")
    parser.add_argument("--targets", type=int, nargs="+", default=[80, 90, 100], choices=sorted(SHARED_KIB))
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=Path("build/kernels/aot.json"))
    parser.add_argument("--cache", type=Path, default=Path("build/kernels/cache"), help="if TRITON_CACHE_DIR is unset")
    return parser


if __name__ == "__main__":
    sys.exit(main())
