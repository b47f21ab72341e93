"""One side of a comparison, a process of its own: variables such as TERCET_NATIVE are read once in a process.

`python -m benchmarks.engine.child MODEL PRECISION wall|cpu` writes a line of JSON once the model is loaded; then one
for each line that it reads, a cell and seconds to measure it for. Between them nothing of it runs.
"""

from __future__ import annotations

import json
import sys
from functools import partial

import torch

from benchmarks.engine.steps import Cell, Step, clock_of, dtype_of, loaded, timed
from model_server.cpp.openmp import release_threads


def main() -> None:
    model, precision, clock_name = sys.argv[1:]
    dtype, clock = dtype_of(precision), clock_of(cpu_time=clock_name == "cpu")
    steps: dict[Cell, Step] = {}
    with loaded(model, precision, one_thread=clock_name == "cpu") as runner:
        _say({"threads": torch.get_num_threads()})
        for line in sys.stdin:
            asked = json.loads(line)
            cell = Cell(asked["label"], tuple(asked["query"]), tuple(asked["context"]))
            if cell not in steps:
                steps[cell] = Step(cell, runner, dtype)
            step = steps[cell]
            times = timed(partial(_run, step), asked["seconds"], clock, least=1)
            release_threads()  # helpers of the runtime look for work a while before they sleep
            _say(times)


def _run(step: Step) -> None:
    step.choose(step.forward())


def _say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
