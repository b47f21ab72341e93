"""One stage, or one part of it, in a process of its own: a fault of the device ends nothing else.

`python -m benchmarks.gpu.child STAGE LINES_FILE ...`; started by `benchmarks.gpu`, and by hand for a debugger.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.roofline import Machine
from benchmarks.gpu.stages.table import BY_NAME
from benchmarks.stopping import exit_on_signals
from model_server.device import enter


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=sorted(BY_NAME))
    parser.add_argument("lines", type=Path)
    parser.add_argument("--part")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--box", type=float, default=600.0, help="seconds")
    parser.add_argument("--machine", help="JSON of what S0 measured")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--seed", type=int)
    options = parser.parse_args()
    # The one that started this asks it to end with SIGTERM: servers that a stage has started are then stopped.
    exit_on_signals()
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", 0)
    else:
        torch.set_num_threads(1)  # toy sizes: threads that wait for a busy core cost more than they bring
    with options.lines.open("a") as lines:
        context = Context(
            device=device,
            tiny=options.tiny,
            deadline=time.monotonic() + options.box,
            lines=lines,
            machine=Machine(**json.loads(options.machine)) if options.machine else None,
            model=options.model,
        )
        if options.seed is not None:
            context.seed = options.seed
        torch.manual_seed(context.seed)
        try:
            with enter(device):  # as the device thread of a shard
                _work(options.stage, options.part)(context)
        except Exception as error:
            traceback.print_exc()
            context.check(f"{options.part or options.stage} ran to its end", False, f"{type(error).__name__}: {error}")
            return 1
    return 0


def _work(stage: str, part: str | None) -> Callable[[Context], None]:
    module = importlib.import_module(f"benchmarks.gpu.stages.{BY_NAME[stage].module}")
    work: Callable[[Context], None] = module.run if part is None else module.PARTS[part]
    return work


if __name__ == "__main__":
    sys.exit(main())
