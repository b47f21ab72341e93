"""S17: a tiny model of every type that transformers knows: its logits on the device against transformers' on the CPU.

The types are shared out among processes. One that a type takes down, or holds up, goes on with the next type.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.context import Context
from benchmarks.gpu.measuring.environment import ROOT

MOST_AT_ONCE = 6
# Of one type, with the compilation of its kernels.
LIMIT_S = 60.0
TOLERANCE = 1e-4
TINY_TYPES = ("llama", "olmo", "rwkv")


class _Worker:
    """A process that tries types one after the other and says a line of JSON for each."""

    def __init__(self, device: str, types: list[str]) -> None:
        self.waiting = types
        self._device = device
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        self.since = time.monotonic()
        environ = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), str(ROOT / "tests")])),
        }
        command = [sys.executable, "-m", "benchmarks.gpu.stages.model_types", self._device, *self.waiting]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, cwd=ROOT
        )

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def said(self) -> dict[str, Any] | None:
        """The next line; None once the process has ended."""
        line = self.output.readline()
        if not line:
            return None
        found: dict[str, Any] = json.loads(line)
        self.waiting.remove(found["type"])
        self.since = time.monotonic()
        return found

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.output.close()

    def go_on(self) -> None:
        """Behind the type that took the process down."""
        self.end()
        self.process = self._start()


def run(context: Context) -> None:
    """All types, as far as there is time."""
    types = list(TINY_TYPES) if context.tiny else _types()
    at_once = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) - 1))
    workers = [_Worker(str(context.device), types[i::at_once]) for i in range(min(at_once, len(types)))]
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.output, selectors.EVENT_READ, worker)
        while selector.get_map() and context.has_time(2):
            for key, _ in selector.select(timeout=1.0):
                _take(context, selector, key.data)
            for worker in [key.data for key in list(selector.get_map().values())]:
                if time.monotonic() - worker.since > LIMIT_S:
                    _lost(context, selector, worker, f"not ended after {LIMIT_S:g} s")
    for worker in workers:
        worker.end()
        for name in worker.waiting:
            context.skip(name, "no time left")


def _take(context: Context, selector: selectors.BaseSelector, worker: _Worker) -> None:
    said = worker.said()
    if said is not None:
        if said["state"] == "skipped":
            context.skip(said["type"], said["detail"])
        else:
            context.check(said["type"], said["state"] == "passed", said["detail"])
    elif worker.waiting:
        _lost(context, selector, worker, f"the process ended with {worker.process.wait()}")
    else:
        selector.unregister(worker.output)


def _lost(context: Context, selector: selectors.BaseSelector, worker: _Worker, why: str) -> None:
    context.check(worker.waiting.pop(0), False, why)
    selector.unregister(worker.output)
    if worker.waiting:
        worker.go_on()
        selector.register(worker.output, selectors.EVENT_READ, worker)


def _types() -> list[str]:
    sys.path.append(str(ROOT / "tests"))
    from parity.table import all_types

    return all_types()


# ---- A process of its own


def main() -> None:
    """DEVICE TYPE..."""
    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    # What a library prints is not mistaken for a line of ours.
    with os.fdopen(os.dup(1), "w") as ours, contextlib.redirect_stdout(sys.stderr):
        for model_type in sys.argv[2:]:
            with tempfile.TemporaryDirectory(prefix=f"type-{model_type}-") as folder:
                state, detail, is_lost = _try(model_type, Path(folder) / "model", torch.device(sys.argv[1]))
            ours.write(json.dumps({"type": model_type, "state": state, "detail": detail}) + "\n")
            ours.flush()
            if is_lost:
                os._exit(1)


def _try(model_type: str, path: Path, device: Any) -> tuple[str, str, bool]:
    """State, detail, whether the device is lost to this process."""
    import torch
    from parity.library import make_case

    from model_server.errors import StartupError

    try:
        case = make_case(model_type, path, eager=model_type != "falcon")
    except Exception as error:  # whatever a config or a modelling comes up with
        return "skipped", f"no tiny model: {type(error).__name__}: {str(error)[:200]}", False
    try:
        with torch.inference_mode():
            kind, error = _error(case, device)
    except StartupError as refusal:
        return "skipped", f"refused: {str(refusal)[:400]}", False
    except Exception as fault:
        where = traceback.format_exc().strip().splitlines()
        return "failed", " | ".join(where[-7:])[-700:], isinstance(fault, torch.AcceleratorError)
    if error <= TOLERANCE:
        return "passed", f"{kind}, error {error:.1e}", False
    return "failed", f"{kind}, error {error:.1e}, on a CPU {_on_cpu(case)}", False


def _on_cpu(case: Any) -> str:
    """The same there: whether the device has a part in it."""
    import torch

    try:
        with torch.inference_mode():
            return f"{_error(case, torch.device('cpu'))[1]:.1e}"
    except Exception as fault:
        return str(fault)[:200]


def _error(case: Any, device: Any) -> tuple[str, float]:
    """The runner's name and the largest difference of a logit, by the largest logit."""
    import torch
    from parity.protocol import STEPS, WHOLE, PagedBatch

    from model_server.attention.choice import AttentionChoice
    from model_server.distributed.placement import Placement
    from model_server.models.load import load_runner
    from model_server.models.model import describe
    from model_server.weights.checkpoint import examine

    placement = Placement(device, torch.float32)
    runner = load_runner(describe(examine(case.path)), placement, AttentionChoice(None, device, torch.float32))
    if runner.traits.recurrent is not None:
        runner.traits.recurrent.reserve(len(case.sequences))
    batch = PagedBatch(runner, list(case.sequences), runner.traits.block_size, torch.float32, device)
    parts: list[list[Any]] = [[] for _ in case.sequences]
    for counts in WHOLE if runner.traits.keeps_state else STEPS:
        for kept, logits in zip(parts, batch.step(counts), strict=True):
            kept.append(logits.float().cpu())
    got = [torch.cat(rows) for rows in parts]
    if runner.traits.decoder_prefix is not None:
        got = [rows[~rows.isnan().any(-1)] for rows in got]
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(got, case.logits, strict=True)]
    return type(runner).__name__, max(errors) if not any(e != e for e in errors) else float("inf")


if __name__ == "__main__":
    main()
