"""How much anonymous memory a rank takes while it loads a checkpoint (`random_checkpoints`), measured from outside.

The rank is a process of its own that loads and does no more.
"""

from __future__ import annotations

import json
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SAMPLE_S = 0.002


@dataclass(frozen=True, slots=True)
class Growth:
    """Bytes of anonymous memory above what the process had before it began to load; times in seconds."""

    share: int  # the rank's own weights
    peak: int
    end: int
    seconds: float

    @property
    def ratio(self) -> float:
        return self.peak / self.share


def measure(
    folder: Path, *, rank: int = 0, world_size: int = 1, dtype: str = "float32", quantize: str | None = None
) -> Growth:
    """Load this rank's part in a process of its own and watch it. quantize: `--quantize`."""
    command = [sys.executable, "-m", "support.loading_memory", str(folder), str(rank), str(world_size), dtype]
    command += [] if quantize is None else [quantize]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        _expect(process.stdout.readline(), "ready")
        base = peak = _anonymous(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            while not selector.select(SAMPLE_S):
                peak = max(peak, _resident_anonymous(process.pid))
        report: dict[str, Any] = json.loads(process.stdout.readline() or "{}")
        if not report:
            raise AssertionError("the rank ended before it had loaded")
        end = _anonymous(process.pid)
        process.stdin.close()
    return Growth(report["share"], max(peak, end) - base, end - base, report["seconds"])


def _expect(line: str, word: str) -> None:
    if line.strip() != word:
        raise AssertionError(f"the rank said {line!r}")


def _anonymous(pid: int) -> int:
    """Exact, but it walks the page tables: for the quiet moments."""
    return _field(Path(f"/proc/{pid}/smaps_rollup"), "Anonymous:")


def _resident_anonymous(pid: int) -> int:
    return _field(Path(f"/proc/{pid}/status"), "RssAnon:")


def _field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    return 0


def _load(folder: Path, rank: int, world_size: int, dtype: str, quantize: str | None = None) -> None:
    import torch

    from model_server.attention.choice import AttentionChoice
    from model_server.device import resolve_dtype, tune
    from model_server.distributed.group import ProcessGroup
    from model_server.distributed.layout import Ranks
    from model_server.distributed.placement import Placement
    from model_server.layers.linear.onednn import weight_packer
    from model_server.models.load import load_runner
    from model_server.models.model import describe
    from model_server.weights.checkpoint import examine

    group = ProcessGroup()
    group.rank, group.size = rank, world_size  # loading needs no word from the others
    device = torch.device("cpu")
    number_type = resolve_dtype(dtype, device)
    tune(device, world_size, 2**30)
    weight_packer(device, number_type)  # what a first product brings into the process is not the weights'
    torch.randn(512, 512) @ torch.randn(512, 512)
    model = describe(examine(folder), quantize=quantize)
    if model.config.model_type == "arcee":  # which is imported only to be loaded
        from transformers.models.arcee import modeling_arcee  # noqa: F401
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    started = time.perf_counter()
    placement = Placement(device, number_type, Ranks.of(group))
    runner = load_runner(model, placement, AttentionChoice(None, device, number_type))
    report = {"share": runner.traits.weight_bytes or 0, "seconds": time.perf_counter() - started}
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
    del runner


if __name__ == "__main__":
    _load(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
